"""Plans the writes of one cycle: the limits of each decision, and the order of writes that the kernel accepts.
It writes nothing. It reads what a limit depends on: the cgroup above, memory usage, the quota below a burst.
Memory limits are lowered in steps, because the kernel reclaims synchronously during the write.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
from msgspec.structs import replace

from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.writer import KnobReading, KnobWriter, OriginalValue, RawValue
from agent.qrm.knobs.knob_files import (
    GROUP_OF,
    KNOB_ORDER,
    LIST_KNOBS,
    KnobLimits,
    canonical,
    quota_ratio,
    round_up_to_pages,
    smaller_size,
)
from agent.qrm.knobs.notation import MAX, parse_number
from api.cpu import parse_cpu_list
from api.decision import Decision, Outcome, OutcomeStatus
from api.interfaces import Unavailable, Vanished
from api.knobs import Knob

_SIZE_KNOBS = (Knob.MEMORY_MAX, Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN, Knob.SWAP_MAX)
_LOWERING_ORDER = (
    Knob.BURST, Knob.QUOTA,
    Knob.MEMORY_MIN, Knob.MEMORY_LOW, Knob.MEMORY_HIGH, Knob.MEMORY_MAX, Knob.SWAP_MAX,
)  # fmt: skip
"""Order in which limits of one cgroup are lowered: the inner before the outer."""
_RAISING_ORDER = (
    Knob.QUOTA, Knob.BURST,
    Knob.MEMORY_MAX, Knob.SWAP_MAX, Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN,
)  # fmt: skip
"""Order in which they are raised. Swap always follows memory: version 1 counts it from there."""


class WritePlan(msgspec.Struct, frozen=True):
    """A decision that changes a knob, or only its original because somebody else has set the knob so already."""

    decision: Decision
    before: str
    raw: RawValue
    clamped_from: str | None = None
    drifted: bool = False
    """Whether the knob was as decided and is not any more."""
    burst: OriginalValue | None = None
    """The group's burst, where it is more than the quota that this plan sets."""

    @property
    def changes(self) -> bool:
        """Whether anything has to be written."""
        return self.before != canonical(self.decision.knob, self.decision.value)

    def outcome(self, status: OutcomeStatus, *, after: str | None = None, error: str = "") -> Outcome:
        """What came of it."""
        return Outcome(
            decision=self.decision,
            status=status,
            before=self.before,
            after=after,
            error=error,
            clamped_from=self.clamped_from,
            repaired=self.drifted and status is OutcomeStatus.APPLIED,
        )


class CycleState(msgspec.Struct):
    """What this round has settled so far that later decisions depend on."""

    cpu_count: int
    quota_exempt: frozenset[str] = frozenset()
    """Cgroups whose quota may go above the owner's."""
    idle: dict[str, bool] = {}
    lists: dict[tuple[str, Knob], str] = {}
    """CPUs and NUMA nodes by cgroup and knob."""
    parent_lists: dict[tuple[str, Knob], tuple[int, ...] | None] = {}
    """What the kernel says of those that nobody decides on."""
    quotas: dict[str, str] = {}

    def settle(self, cgroup: str, knob: Knob, value: str) -> None:
        """That knob is going to have this value."""
        if knob in LIST_KNOBS and value:
            self.lists[cgroup, knob] = value
        elif knob is Knob.IDLE:
            self.idle[cgroup] = value == "1"
        elif knob is Knob.QUOTA:
            self.quotas[cgroup] = value


def planning_order(decision: Decision) -> tuple[int, int]:
    """Parents first: a cpuset is clamped to what the one above will have."""
    return KNOB_ORDER.index(decision.knob), decision.cgroup.count("/")


def writing_order(plan: WritePlan) -> tuple[int, bool, int, int]:
    """Group by group. Lists that only gain come first, from the top down, then the others, from the bottom up; limits are
    lowered from the inner to the outer and from the bottom up, before others are raised the other way round."""
    decision = plan.decision
    knob, depth, grows = decision.knob, decision.cgroup.count("/"), _grows(plan)
    if knob in LIST_KNOBS:
        return GROUP_OF[knob], not grows, 0, depth if grows else -depth
    ranks = _RAISING_ORDER if grows else _LOWERING_ORDER
    return GROUP_OF[knob], grows, ranks.index(knob) if knob in ranks else 0, depth if grows else -depth


def grows_memory(plan: WritePlan) -> bool:
    """Whether more memory is going to be allowed than before."""
    return plan.decision.knob is Knob.MEMORY_MAX and _grows(plan)


def lowered_quota(plan: WritePlan) -> int | None:
    """Microseconds of a quota that this plan sets, if they are fewer than before: no burst may exceed them."""
    if plan.decision.knob is not Knob.QUOTA:
        return None
    quota, before = canonical(Knob.QUOTA, plan.decision.value).split()[0], plan.before.split()[0]
    return None if quota == MAX or (before != MAX and int(quota) >= int(before)) else int(quota)


def _grows(plan: WritePlan) -> bool:
    knob, before, value = plan.decision.knob, plan.before, canonical(plan.decision.knob, plan.decision.value)
    if knob in LIST_KNOBS:
        return set(parse_cpu_list(before)) <= set(parse_cpu_list(value))
    if knob is Knob.QUOTA:
        return quota_ratio(value) >= quota_ratio(before)
    if knob in _SIZE_KNOBS:
        return value == MAX or (before != MAX and int(value) >= int(before))
    return knob is not Knob.BURST or int(value) >= int(before)


def nested_cgroups(cgroups: Collection[str]) -> set[str]:
    """Those that another of them is above or below."""
    all_of_them, found = set(cgroups), set[str]()
    for cgroup in all_of_them:
        above = cgroup.rpartition("/")[0]
        while above:
            if above in all_of_them:
                found |= {cgroup, above}
            above = above.rpartition("/")[0]
    return found


def with_note(outcome: Outcome, note: str) -> Outcome:
    """The same, with one more remark before what it says already."""
    if not note:
        return outcome
    return msgspec.structs.replace(outcome, error="; ".join(filter(None, (note, outcome.error))))


def original_of(decision: Decision, knob: Knob, raw: RawValue) -> OriginalValue:
    """What a knob of the decision's cgroup holds, as it is journalled."""
    return OriginalValue(cgroup=decision.cgroup, cgroup_id=decision.cgroup_id, knob=knob, raw=raw)


def failure_outcome(
    decision: Decision,
    error: Unavailable | Vanished,
    *,
    before: str | None = None,
    after: str | None = None,
    clamped_from: str | None = None,
) -> Outcome:
    """What came of a decision that could not be carried out."""
    vanished = isinstance(error, Vanished)
    return Outcome(
        decision=decision,
        status=OutcomeStatus.VANISHED if vanished else OutcomeStatus.REFUSED,
        before=before,
        after=after,
        error=f"{error.reason}: {error.remedy}" if isinstance(error, Unavailable) else str(error),
        clamped_from=clamped_from,
    )


STEP_BYTES = 256 << 20
"""A limit on memory is lowered by so much of what has to be given up at a time: dropping that much page cache takes about
0.1 s, and the round waits for it."""
SLACK_BYTES = 8 << 20
"""Page cache that is not counted on: of the last few MiB the kernel often finds nothing to drop, and gives up."""
USAGE_FILES = {"v1": "memory.usage_in_bytes", "v2": "memory.current"}
"""Where each version says how many bytes a group uses."""
_CACHE_KEYS = {"v1": ("total_inactive_file", "total_active_file"), "v2": ("inactive_file", "active_file")}
_UNRECLAIMABLE_KEYS = {
    "v1": ("total_dirty", "total_writeback", "total_unevictable"),
    "v2": ("file_dirty", "file_writeback", "unevictable"),
}
STEPPED_KNOBS = (Knob.MEMORY_MAX, Knob.MEMORY_HIGH)
"""The kernel reclaims at once what is above these, while the one who writes them waits."""
_OWNER_LIMITED_KNOBS = (Knob.MEMORY_MAX, Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN, Knob.SWAP_MAX, Knob.IO_MAX)


def limits_of(
    decision: Decision,
    asked: str,
    before: str,
    files: KnobWriter,
    state: CycleState,
    own: str,
) -> KnobLimits:
    """What bounds this decision, which asks for a canonical value where there is `before`;
    `own` is what the owner has set. Raises Unavailable."""
    cgroup, knob = decision.cgroup, decision.knob
    machine = KnobLimits(cpu_count=state.cpu_count, empty_inherits_parent=files.version == "v2")
    if knob in LIST_KNOBS:
        above = (cgroup.rpartition("/")[0], knob)
        if above in state.lists:
            # What lies below a container follows it, and what its owner pinned there stays within that.
            whole, pinned = parse_cpu_list(state.lists[above]), set(parse_cpu_list(own))
            return replace(machine, allowed=tuple(cpu for cpu in whole if cpu in pinned) or whole)
        if above not in state.parent_lists:
            state.parent_lists[above] = files.ceiling(cgroup, knob)
        return replace(machine, allowed=state.parent_lists[above])
    if knob is Knob.QUOTA:
        return replace(machine, own_quota=own)
    if knob is Knob.BURST:
        quota = state.quotas.get(cgroup) or files.read(cgroup, decision.cgroup_id, Knob.QUOTA)
        return replace(machine, quota=quota)
    if knob in (Knob.WEIGHT, Knob.IO_WEIGHT):
        return replace(machine, weights=files.weights(cgroup, knob))
    floor = 0
    if knob in STEPPED_KNOBS and smaller_size(asked, before) == asked != before:
        floor = floor_bytes(decision, int(asked), files)
    return replace(machine, own=own if knob in _OWNER_LIMITED_KNOBS else None, floor_bytes=floor)


def owner_value(
    decision: Decision, reading: KnobReading, theirs: str | None, files: KnobWriter, originals: OriginalsJournal | None
) -> str:
    """What the owner set: `theirs` where that is what is there now, the journalled original, or what was read if the agent
    never wrote that knob."""
    entry = originals.find(decision.cgroup, decision.cgroup_id, decision.knob) if originals else None
    if theirs is not None:
        return theirs
    raw = reading.raw if entry is None else entry.raw
    return files.decode(decision.cgroup, decision.knob, raw, reading.beside)


def floor_bytes(decision: Decision, asked_bytes: int, files: KnobWriter) -> int:
    """The lowest limit on memory that the kernel can keep without killing somebody, as far as one can know.

    It is what is used now without half of the clean page cache: the other half is room for what the group takes while the
    limit is being written. A limit is therefore lowered in steps, one a round. memory.high kills nobody: only the step
    counts.
    """
    cgroup, cgroup_id = decision.cgroup, decision.cgroup_id
    try:
        used = parse_number(files.read_text(cgroup, cgroup_id, "memory", USAGE_FILES[files.version]))
        if used <= asked_bytes:
            return 0
        if decision.knob is Knob.MEMORY_HIGH:
            return round_up_to_pages(max(used - STEP_BYTES, 0))
        stat = _parse_memory_stat(files.read_text(cgroup, cgroup_id, "memory", "memory.stat"))
    except ValueError as error:
        raise Unavailable(f"{cgroup}: nobody knows how much memory it uses: {error}", "see its memory.stat") from None
    cache = sum(stat.get(key, 0) for key in _CACHE_KEYS[files.version])
    free = max(cache - sum(stat.get(key, 0) for key in _UNRECLAIMABLE_KEYS[files.version]) - SLACK_BYTES, 0)
    return round_up_to_pages(used - min(free // 2, STEP_BYTES))


def _parse_memory_stat(text: str) -> Mapping[str, int]:
    pairs = (line.partition(" ") for line in text.splitlines())
    return {key: parse_number(value) for key, _, value in pairs}
