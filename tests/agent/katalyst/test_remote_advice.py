"""A cycle with external advice: from the bytes of an answer to the knob values of cgroups."""

from __future__ import annotations

import msgspec

from agent.advisor.engine import ExternalAdvice, PolicyState, evaluate_policy
from agent.advisor.policy_result import PolicyResult
from agent.katalyst.admission import build_admission_inputs
from agent.katalyst.cpu_advice_codec import decode_cpu_advice
from agent.katalyst.memory_advice_codec import decode_memory_advice
from agent.qrm.decisions.cpu import compose_decisions
from api.cpu import parse_cpu_list
from api.knobs import Knob
from api.proto import advisor_svc_pb2 as svc
from api.proto import cpu_advisor_pb2 as cpu
from api.qos import QoSLevel
from api.snapshot import CgroupSample, NumaNode, Snapshot
from tests.agent.advisor.builders import snapshot
from tests.agent.katalyst.builders import node, pod
from tests.builders.settings import parse_config

NODE = {0: 24, 1: 24}
WEB, BATCH = pod("web", cores=6), pod("batch", QoSLevel.RECLAIMED)
GI = 1 << 30
CONFIG = parse_config(
    b"advisor: {policy: canonical}\nplacing: {rampUpS: 0}\nmemory: {reclaimRoot: /kubepods/besteffort}", "test.yaml"
)


def snapshot_at(second: int) -> Snapshot:
    paths = ("/kubepods/web", "/kubepods/batch", "/kubepods/besteffort")
    shot = snapshot(second, (WEB, BATCH), cpus=node())
    cgroups = {path: CgroupSample(path=path, id=50 + index, memory_bytes=GI) for index, path in enumerate(paths)}
    memory = {numa: NumaNode(meminfo={"MemTotal": 64 * GI}) for numa in NODE}
    sample = msgspec.structs.replace(shot.node, numa=memory)
    return msgspec.structs.replace(shot, cgroups={**shot.cgroups, **cgroups}, node=sample)


def answer() -> cpu.GetAdviceResponse:
    answer_ = cpu.GetAdviceResponse()
    for name, numa, cpus in (("share", -1, 11), ("reclaim", -1, 13)):
        info = answer_.entries[name].entries[""]
        info.owner_pool_name = name
        info.calculation_results_by_numas[numa].blocks.add(result=cpus, block_id=name)
    headroom = answer_.extra_entries.add()
    headroom.calculation_result.values["cpu_numa_headroom"] = '{"0":4.5,"1":3}'
    return answer_


def decision_values(result: PolicyResult, now: Snapshot) -> dict[tuple[str, Knob], str]:
    knobs = dict.fromkeys(now.cgroups, frozenset(Knob))
    return {(decision.cgroup, decision.knob): decision.value for decision in compose_decisions(result, now, knobs)}


def test_sizes_headroom_and_limits_come_from_the_external_advisors() -> None:
    memory = svc.GetAdviceResponse()
    root = memory.extra_entries.add(cgroup_path="/kubepods/besteffort")
    root.calculation_result.values["memory_limit_in_bytes"] = str(8 * GI)
    foreign = memory.extra_entries.add(cgroup_path="/system.slice")
    foreign.calculation_result.values["memory_limit_in_bytes"] = "1"
    state, result, external = PolicyState(), PolicyResult(), ExternalAdvice()
    for second in range(3):
        now = snapshot_at(second)
        advice = decode_cpu_advice(cpu.GetAdviceResponse.FromString(answer().SerializeToString()), now.pods, NODE, None)
        external = ExternalAdvice(cpu=advice, memory=decode_memory_advice(memory, now.pods, {}))
        result, state = evaluate_policy(now, CONFIG, state, now.taken_at_ns, external)
    values = decision_values(result, now)
    assert len(parse_cpu_list(values["/kubepods/web", Knob.CPUSET])) == 11
    assert len(parse_cpu_list(values["/kubepods/batch", Knob.CPUSET])) == 13
    assert values["/kubepods/besteffort", Knob.MEMORY_MAX] == str(8 * GI)
    assert ("/system.slice", Knob.MEMORY_MAX) not in values, "cgroups outside the reclaim root are not limited"
    assert result.advice is not None
    assert result.advice.policy == "katalyst"
    assert result.advice.reclaimable_cores == 13
    assert result.advice.headroom is not None
    assert result.advice.headroom.cores_by_numa == {0: 4.5, 1: 3.0}
    assert result.memory is not None
    assert result.memory.policy == "katalyst"
    internal, _state = evaluate_policy(now, CONFIG, state, now.taken_at_ns)
    assert internal.advice is not None
    assert internal.advice.policy == "canonical", "without external advice the built-in policy is used"
    inputs = build_admission_inputs(now, result.advice.cpu.sizes, state.cpus, CONFIG.placing)
    assert inputs.memory_by_numa == {0: 64 * GI, 1: 64 * GI}
    assert len(inputs.topology.cpus) == 48
