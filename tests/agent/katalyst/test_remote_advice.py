"""A whole round that obeys somebody else's advisors: from the bytes of an answer to what cgroups are to have."""

from __future__ import annotations

import msgspec

from agent.advisor.engine import ExternalAdvice, PolicyState, evaluate_policy
from agent.config.loader import parse_config
from agent.katalyst.admission import build_admission_inputs
from agent.katalyst.cpu_advice_codec import decode_cpu_advice
from agent.katalyst.memory_advice_codec import decode_memory_advice as memory_taken
from agent.qrm.decisions.compose import PolicyResult, compose_decisions
from api.cpu import parse_cpu_list
from api.knobs import Knob
from api.measurements import NumaNode
from api.proto import advisor_svc_pb2 as svc
from api.proto import cpu_advisor_pb2 as cpu
from api.qos import QoSLevel
from api.snapshot import CgroupSample, Snapshot
from tests.agent.advisor.builders import snapshot
from tests.agent.katalyst.builders import node, pod

NODE = {0: 24, 1: 24}
WEB, BATCH = pod("web", cores=6), pod("batch", QoSLevel.RECLAIMED)
GI = 1 << 30
CONFIG = parse_config(
    b"advisor: {policy: canonical}\nplacing: {rampUpS: 0}\nmemory: {reclaimRoot: /kubepods/besteffort}", "test.yaml"
)


def seen(second: int) -> Snapshot:
    paths = ("/kubepods/web", "/kubepods/batch", "/kubepods/besteffort")
    made = snapshot(second, (WEB, BATCH), cpus=node())
    cgroups = {path: CgroupSample(path=path, id=50 + index, memory_bytes=GI) for index, path in enumerate(paths)}
    memory = {numa: NumaNode(meminfo={"MemTotal": 64 * GI}) for numa in NODE}
    sample = msgspec.structs.replace(made.node, numa=memory)
    return msgspec.structs.replace(made, cgroups={**made.cgroups, **cgroups}, node=sample)


def answer() -> cpu.GetAdviceResponse:
    said = cpu.GetAdviceResponse()
    for name, numa, cpus in (("share", -1, 11), ("reclaim", -1, 13)):
        info = said.entries[name].entries[""]
        info.owner_pool_name = name
        info.calculation_results_by_numas[numa].blocks.add(result=cpus, block_id=name)
    headroom = said.extra_entries.add()
    headroom.calculation_result.values["cpu_numa_headroom"] = '{"0":4.5,"1":3}'
    return said


def decided(judged: PolicyResult, now: Snapshot) -> dict[tuple[str, Knob], str]:
    knobs = dict.fromkeys(now.cgroups, frozenset(Knob))
    return {(one.cgroup, one.knob): one.value for one in compose_decisions(judged, now, knobs)}


def test_sizes_headroom_and_limits_are_theirs() -> None:
    memory = svc.GetAdviceResponse()
    root = memory.extra_entries.add(cgroup_path="/kubepods/besteffort")
    root.calculation_result.values["memory_limit_in_bytes"] = str(8 * GI)
    foreign = memory.extra_entries.add(cgroup_path="/system.slice")
    foreign.calculation_result.values["memory_limit_in_bytes"] = "1"
    known, judged, told = PolicyState(), PolicyResult(), ExternalAdvice()
    for second in range(3):
        now = seen(second)
        advice = decode_cpu_advice(cpu.GetAdviceResponse.FromString(answer().SerializeToString()), now.pods, NODE, None)
        told = ExternalAdvice(cpu=advice, memory=memory_taken(memory, now.pods, {}))
        judged, known = evaluate_policy(now, CONFIG, known, now.taken_at_ns, told)
    values = decided(judged, now)
    assert len(parse_cpu_list(values["/kubepods/web", Knob.CPUSET])) == 11
    assert len(parse_cpu_list(values["/kubepods/batch", Knob.CPUSET])) == 13
    assert values["/kubepods/besteffort", Knob.MEMORY_MAX] == str(8 * GI)
    assert ("/system.slice", Knob.MEMORY_MAX) not in values, "what nobody named is nobody's to limit"
    assert judged.advice is not None
    assert judged.advice.policy == "katalyst"
    assert judged.advice.reclaimable_cores == 13
    assert judged.advice.headroom is not None
    assert judged.advice.headroom.cores_by_numa == {0: 4.5, 1: 3.0}
    assert judged.memory is not None
    assert judged.memory.policy == "katalyst"
    alone, _known = evaluate_policy(now, CONFIG, known, now.taken_at_ns)
    assert alone.advice is not None
    assert alone.advice.policy == "canonical", "an advisor that is not trusted any more is replaced by ours"
    situation = build_admission_inputs(now, judged.advice.cpu.sizes, known.cpus, CONFIG.placing)
    assert situation.memory_by_numa == {0: 64 * GI, 1: 64 * GI}
    assert len(situation.topology.cpus) == 48
