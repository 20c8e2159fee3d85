"""Which CPUs whole rounds leave to whom: those that are somebody's alone, and those that no pod may have."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config import Config
from agent.policy import Judged, Remembered, judge
from agent.qrm.cpu import managed
from agent.settings import parse
from api.facts import Limits
from api.knobs import Knob
from api.qos import QoSLevel
from api.samples import CgroupSample, Snapshot
from tests.agent.advisor.builders import pod, snapshot


def settings(text: str) -> Config:
    return parse(text.encode(), "test.yaml")


def confined(seen: Snapshot, lists: Mapping[str, str | None]) -> Snapshot:
    """The same with these CPU lists in force, by cgroup; cgroups that are not there are made."""
    cgroups = dict(seen.cgroups)
    for path, cpus in lists.items():
        sample = cgroups.get(path, CgroupSample(path=path, id=50 + len(cgroups)))
        cgroups[path] = msgspec.structs.replace(sample, limits=Limits(cpus=cpus))
    return msgspec.structs.replace(seen, cgroups=cgroups)


def cpusets(seen: Snapshot, judged: Judged) -> dict[str, str]:
    knobs = dict.fromkeys(managed(seen.pods), frozenset(Knob))
    return {d.cgroup: d.value for d in judged.decisions(seen, knobs) if d.knob is Knob.CPUSET}


DB, BATCH, WEB = pod("db", QoSLevel.DEDICATED, request=2.0), pod("b", QoSLevel.RECLAIMED), pod("web", QoSLevel.SHARED)


def test_suppressed_pods_get_no_cpus_that_are_for_others_alone() -> None:
    """8 x 65 % without load is 6 CPUs; 0 and 1 serve interrupts, 2 is the system's, and two are db's by its own cpuset."""
    config = settings(
        "advisor: {policy: none}\n"
        "placing: {interruptCpuList: '0-1', reservedCpuList: '2'}\n"
        "knobs: {suppress: {policy: cpuset}}\n"
    )
    known, found = Remembered(), dict[str, str]()
    for second in range(6):
        seen = confined(snapshot(second, [DB, BATCH], cpus=8, usage_s={"db": 0.0, "b": 0.0}), {"/db": "3-4"})
        seen = msgspec.structs.replace(seen, node=msgspec.structs.replace(seen.node, cpu=seen.node.per_cpu[0]))
        judged, known = judge(seen, config, known, seen.taken_at_ns)
        found = cpusets(seen, judged)
    assert found == {"/b": "5-7"}
