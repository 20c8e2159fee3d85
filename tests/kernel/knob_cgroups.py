"""Real cgroups with odd values in every knob, for tests that compare knobs bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import Decision, Outcome, OutcomeStatus
from api.knobs import Knob, Reason
from tests.kernel.real_cgroups import TestCgroup, cgroup

ODD = {
    "v1": {
        "cpu.shares": "333\n",
        "cpu.cfs_period_us": "50000\n",
        "cpu.cfs_quota_us": "70000\n",
        "cpu.cfs_burst_us": "30000\n",
        "cpuset.cpus": "0\n",
        "memory.limit_in_bytes": "134217728\n",
    },
    "v2": {
        "cpu.weight": "33\n",
        "cpu.max": "70000 50000\n",
        "cpu.max.burst": "30000\n",
        "cpuset.cpus": "0\n",
        "memory.max": "134217728\n",
    },
}
"""Values that differ from every default and from every decision of these tests."""
FILES = {
    "v1": (*ODD["v1"], "cpu.idle"),
    "v2": (*ODD["v2"], "cpu.idle"),
}
VERDICT = Reason(rule="wait_above_target", text="online pods waited 9 ms, which is above 2 ms")


class KnobCgroup:
    """A real cgroup with the raw text of every knob's file."""

    def __init__(self, group: TestCgroup) -> None:
        self.cgroup, self.path = group, group.path
        self.version = "v2" if group.hierarchy.mode == "v2" else "v1"

    @property
    def id(self) -> int:
        return self.cgroup.id

    def texts(self) -> dict[str, str]:
        return {name: self.cgroup.file(name.split(".")[0], name).read_text() for name in FILES[self.version]}

    def put(self, texts: Mapping[str, str]) -> None:
        """Write these raw texts; cpu.idle comes last, because it resets the weight."""
        self.cgroup.file("cpu", "cpu.idle").write_text("0\n")
        if "cpu.cfs_quota_us" in texts:
            self.cgroup.file("cpu", "cpu.cfs_quota_us").write_text("-1\n")
        for name, text in texts.items():
            if name != "cpu.idle":
                self.cgroup.file(name.split(".")[0], name).write_text(text)

    def decide(self, knob: Knob, value: str, cgroup_id: int | None = None) -> Decision:
        return Decision(
            cgroup=self.path,
            cgroup_id=self.id if cgroup_id is None else cgroup_id,
            pod="default/batch",
            knob=knob,
            value=value,
            reason=VERDICT,
        )


def give_controllers(group: TestCgroup) -> None:
    """Enable all controllers for the children of a cgroup, as version 2 requires."""
    if group.hierarchy.mode == "v2" and group.hierarchy.v2 is not None:
        (group.hierarchy.v2 / group.path.lstrip("/") / "cgroup.subtree_control").write_text("+cpu +cpuset +memory")


@contextmanager
def nested(hierarchy: Hierarchy, name: str) -> Iterator[tuple[KnobCgroup, KnobCgroup]]:
    """Yield a cgroup and one inside it, with odd values."""
    with ExitStack() as stack:
        outer = stack.enter_context(cgroup(hierarchy, name))
        give_controllers(outer)
        inner = TestCgroup(hierarchy, f"{outer.path}/inner")
        stack.callback(inner.close)
        pair = KnobCgroup(outer), KnobCgroup(inner)
        pair[1].put({"cpuset.cpus": "0\n"})
        pair[0].put(ODD[pair[0].version])
        yield pair


def statuses(outcomes: tuple[Outcome, ...]) -> list[OutcomeStatus]:
    return [outcome.status for outcome in outcomes]
