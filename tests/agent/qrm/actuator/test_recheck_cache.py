"""Knobs with unchanged decisions are read every few seconds; drifted values are repaired and counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.qrm.actuator.one_shot import IN_PROGRESS
from agent.qrm.actuator.recheck_cache import RECHECK_ALL_CYCLES, RECHECK_LACKING_CYCLES, RECHECK_NS
from agent.qrm.actuator.writer import KnobReading, KnobWriter
from api.decision import Outcome, OutcomeStatus
from api.knobs import Knob
from tests.agent.qrm.actuator.trees import Bench, S

PATHS = ("/batch", "/batch/inner", "/other")


class Counted(KnobWriter):
    """Records which knobs were read."""

    looked: list[tuple[str, Knob]]

    def read_with_context(
        self,
        cgroup: str,
        cgroup_id: int,
        knob: Knob,
        directory_id: int | None = None,
        unchanged: Mapping[str, str] | None = None,
    ) -> KnobReading:
        self.looked.append((cgroup, knob))
        return super().read_with_context(cgroup, cgroup_id, knob, directory_id, unchanged)


class Node(Bench):
    """A tree and an actuator that is given the time in seconds."""

    files: Counted

    def __init__(self, root: Path, mode: str) -> None:
        super().__init__(root, mode, cgroups=PATHS, writer=Counted)
        self.files.looked = []

    def cycle(self, at_s: float, requests: Mapping[tuple[str, Knob], str]) -> tuple[Outcome, ...]:
        """Return the outcomes of one cycle; `files.looked` has the knobs that it read."""
        self.files.looked.clear()
        return self.apply(*((path, knob, value) for (path, knob), value in requests.items()), at_s=at_s)


@pytest.fixture(params=["v1", "v2"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    instance = Node(tmp_path, request.param)
    yield instance
    instance.close()


REQUESTS = {
    ("/batch", Knob.QUOTA): "50000",
    ("/batch", Knob.IDLE): "1",
    ("/other", Knob.CPUSET): "1-2",
    ("/other", Knob.IO_WEIGHT): "99999",
}


def settle(node: Node) -> None:
    """Run cycles until every knob has been read twice."""
    node.cycle(0, REQUESTS)
    node.cycle(RECHECK_NS / S, REQUESTS)


def test_unchanged_decisions_are_not_read(node: Node) -> None:
    first = node.cycle(0, REQUESTS)
    assert {outcome.status for outcome in first} == {OutcomeStatus.APPLIED}
    settle(node)
    again = node.cycle(RECHECK_NS / S + 1, REQUESTS)
    assert node.files.looked == []
    assert [(o.status, o.decision, o.after, o.clamped_from) for o in again] == [
        (OutcomeStatus.UNCHANGED, o.decision, o.after, o.clamped_from) for o in first
    ]
    max_weight = "10000" if node.tree.hierarchy.mode == "v2" else "1000"
    assert (again[3].after, again[3].clamped_from) == (max_weight, "99999")


def test_everything_is_read_again_within_five_seconds_with_one_cycle_per_second(node: Node) -> None:
    settle(node)
    last = dict.fromkeys(REQUESTS, 4.0)
    for at_s in range(5, 40):
        node.cycle(at_s, REQUESTS)
        for key in REQUESTS:
            if key in node.files.looked:
                last[key] = at_s
            assert at_s - last[key] < 5, key


def test_without_the_time_everything_is_read_in_every_cycle(node: Node) -> None:
    for _ in range(3):
        node.files.looked.clear()
        node.apply(*((*key, value) for key, value in REQUESTS.items()))
        assert set(REQUESTS) <= set(node.files.looked)


@pytest.mark.parametrize(
    ("changed", "read"),
    [
        (("/batch", Knob.QUOTA), {("/batch", Knob.QUOTA)}),
        (("/other", Knob.IO_WEIGHT), {("/other", Knob.IO_WEIGHT)}),
        (("/batch", Knob.IDLE), {("/batch", Knob.IDLE)}),
    ],
)
def test_only_a_changed_decision_is_read(node: Node, changed: tuple[str, Knob], read: set[tuple[str, Knob]]) -> None:
    settle(node)
    values = {Knob.QUOTA: "40000", Knob.IO_WEIGHT: "7", Knob.IDLE: "0"}
    node.cycle(4.1, {**REQUESTS, changed: values[changed[1]]})
    assert set(node.files.looked) & set(REQUESTS) == read


def test_knobs_that_depend_on_a_changed_one_are_read(node: Node) -> None:
    requests = {("/batch", Knob.CPUSET): "0-3", ("/batch/inner", Knob.CPUSET): "0-3", ("/batch", Knob.BURST): "100"}
    node.cycle(0, requests)
    node.cycle(4, requests)
    inner = node.cycle(4.1, {**requests, ("/batch", Knob.CPUSET): "2"})[1]
    assert (inner.after, inner.clamped_from) == ("2", "0-3"), (
        "the cgroup below is restricted to the new CPUs in the same cycle"
    )
    node.cycle(4.2, {**requests, ("/batch", Knob.QUOTA): "90000"})
    assert ("/batch", Knob.BURST) in node.files.looked


def drift(node: Node) -> None:
    name = "cpu.max" if node.tree.hierarchy.mode == "v2" else "cpu.cfs_quota_us"
    node.tree.file("/batch", name).write_text("80000 100000\n" if name == "cpu.max" else "80000\n")


def test_drift_is_repaired_and_counted(node: Node) -> None:
    settle(node)
    drift(node)
    outcomes = [outcome for second in (1, 2, 3, 4) for outcome in node.cycle(4 + second, REQUESTS)]
    assert [o.decision.knob for o in outcomes if o.status is OutcomeStatus.APPLIED] == [Knob.QUOTA]
    (repaired,) = (o for o in outcomes if o.repaired)
    assert (repaired.before, repaired.after) == ("80000 100000", "50000 100000")


def test_a_changed_decision_is_no_drift(node: Node) -> None:
    settle(node)
    outcomes = node.cycle(5, {**REQUESTS, ("/batch", Knob.QUOTA): "20000"})
    assert [(o.status, o.repaired) for o in outcomes if o.decision.knob is Knob.QUOTA] == [
        (OutcomeStatus.APPLIED, False)
    ]


def test_refusals_are_tried_again_in_every_cycle(node: Node) -> None:
    requests = {("/batch", Knob.CPUSET): "7"}
    for at_s in range(3):
        (outcome,) = node.cycle(at_s, requests)
        assert outcome.status is OutcomeStatus.REFUSED
        assert node.files.looked == [("/batch", Knob.CPUSET)]


def test_a_new_cgroup_on_the_path_is_read(node: Node) -> None:
    settle(node)
    node.tree.remove("/other")
    node.tree.make("/other")
    outcome = node.cycle(4.1, REQUESTS)[2]
    assert (outcome.status, outcome.before) == (
        OutcomeStatus.APPLIED,
        "" if node.tree.hierarchy.mode == "v2" else "0-3",
    )


def test_one_shot_decisions_are_never_cached(node: Node) -> None:
    requests = {("/batch", Knob.DROP_CACHE): "4096", ("/batch", Knob.QUOTA): "50000"}
    for at_s in range(3):
        drop, _ = node.cycle(at_s, requests)
        assert (drop.status, drop.error) == (OutcomeStatus.UNCHANGED, IN_PROGRESS)


KNOBS = (Knob.CPUSET, Knob.MEMS, Knob.QUOTA, Knob.BURST, Knob.IO_WEIGHT, Knob.MEMORY_MAX, Knob.SWAP_MAX)
CHANGE = st.tuples(st.sampled_from(PATHS), st.sampled_from(KNOBS), st.integers(0, 2))
VALUES = {
    Knob.CPUSET: ("0-3", "1-2", "2"),
    Knob.MEMS: ("0-1", "0", "1"),
    Knob.QUOTA: ("50000", "20000", "max"),
    Knob.BURST: ("30000", "0", "90000"),
    Knob.IO_WEIGHT: ("100", "7", "9999"),
    Knob.MEMORY_MAX: ("1048576", "2097152", "max"),
    Knob.SWAP_MAX: ("4096", "0", "8192"),
}


@settings(max_examples=40, deadline=None)
@given(st.lists(CHANGE, min_size=1, max_size=8), st.sampled_from(("v1", "v2")))
@example([("/other", Knob.MEMS, 1), ("/batch", Knob.CPUSET, 1)], "v1")
@example([("/other", Knob.MEMS, 0), ("/batch", Knob.MEMS, 2)], "v2")
@example([("/batch", Knob.BURST, 2), ("/batch", Knob.QUOTA, 1), ("/batch", Knob.QUOTA, 0)], "v2")
@example([("/batch", Knob.SWAP_MAX, 2), ("/batch", Knob.MEMORY_MAX, 1), ("/batch", Knob.MEMORY_MAX, 0)], "v1")
@example([("/batch/inner", Knob.MEMORY_MAX, value) for value in (1, 0, 1)], "v1")
def test_the_cache_changes_no_write(changes: list[tuple[str, Knob, int]], mode: str) -> None:
    """Two actuators, one of which gets the time: within the recheck interval both write the same."""
    requests = {(path, knob): VALUES[knob][0] for path in PATHS for knob in KNOBS}
    with TemporaryDirectory() as directory:
        timed, plain = (Node(Path(directory) / name, mode) for name in ("timed", "plain"))
        for number, (path, knob, value) in enumerate([changes[0], *changes, changes[-1], changes[-1]]):
            requests[path, knob] = VALUES[knob][value]
            outcomes = timed.cycle(number * 0.001, requests)
            assert not [o for o in outcomes if o.repaired], "there was no external write"
            plain.apply(*((*key, value) for key, value in requests.items()))
        assert [timed.tree.texts(path) for path in PATHS] == [plain.tree.texts(path) for path in PATHS]
        timed.close()
        plain.close()


def test_available_knobs_are_probed_again_periodically(node: Node) -> None:
    idle = node.tree.file("/other", "cpu.idle")
    idle.unlink()
    lacking = [
        Knob.IDLE in node.actuator.knobs(["/batch", "/other"])["/other"] for _ in range(RECHECK_LACKING_CYCLES - 1)
    ]
    idle.write_text("0\n")
    assert not any(lacking)
    assert Knob.IDLE in node.actuator.knobs(["/batch", "/other"])["/other"]
    idle.unlink()
    there = [Knob.IDLE in node.actuator.knobs(["/batch", "/other"])["/other"] for _ in range(RECHECK_ALL_CYCLES)]
    assert there == [True] * (RECHECK_ALL_CYCLES - RECHECK_LACKING_CYCLES - 1) + [False] * (RECHECK_LACKING_CYCLES + 1)
