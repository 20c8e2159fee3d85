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
from api.interfaces import Unavailable
from api.knobs import Knob

_SIZE_KNOBS = (Knob.MEMORY_MAX, Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN, Knob.SWAP_MAX)
_LOWERING_ORDER = (
    Knob.BURST, Knob.QUOTA,
    Knob.MEMORY_MIN, Knob.MEMORY_LOW, Knob.MEMORY_HIGH, Knob.MEMORY_MAX, Knob.SWAP_MAX,
)  # fmt: skip
"""Order in which limits of one cgroup are lowered: the inner limit before the outer."""
_RAISING_ORDER = (
    Knob.QUOTA, Knob.BURST,
    Knob.MEMORY_MAX, Knob.SWAP_MAX, Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN,
)  # fmt: skip
"""Order in which limits are raised. Swap follows memory, because version 1 limits their sum."""


class WritePlan(msgspec.Struct, frozen=True):
    """A decision that changes a knob, or only its original after an external modification."""

    decision: Decision
    before: str
    raw: RawValue
    clamped_from: str | None = None
    drifted: bool = False
    """Whether the knob had the decided value before and lost it."""
    burst: OriginalValue | None = None
    """Burst of the cgroup if it exceeds the planned quota."""

    @property
    def changes(self) -> bool:
        """Whether anything has to be written."""
        return self.before != canonical(self.decision.knob, self.decision.value)

    def outcome(self, status: OutcomeStatus, *, after: str | None = None, error: str = "") -> Outcome:
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
    """Values planned in this cycle that later decisions depend on."""

    cpu_count: int
    quota_exempt: frozenset[str] = frozenset()
    """Cgroups whose quota may exceed the owner's."""
    idle: dict[str, bool] = {}
    lists: dict[tuple[str, Knob], str] = {}
    """CPUs and NUMA nodes by cgroup and knob."""
    parent_lists: dict[tuple[str, Knob], tuple[int, ...] | None] = {}
    """Lists that the kernel reports for cgroups without a decision."""
    quotas: dict[str, str] = {}

    def set_value(self, cgroup: str, knob: Knob, value: str) -> None:
        """Record the planned value of a knob."""
        if knob in LIST_KNOBS and value:
            self.lists[cgroup, knob] = value
        elif knob is Knob.IDLE:
            self.idle[cgroup] = value == "1"
        elif knob is Knob.QUOTA:
            self.quotas[cgroup] = value


def planning_order(decision: Decision) -> tuple[int, int]:
    """Return the sort key of planning: parents first, because a cpuset is clamped to its parent's."""
    return KNOB_ORDER.index(decision.knob), decision.cgroup.count("/")


def writing_order(plan: WritePlan) -> tuple[int, bool, int, int]:
    """Return the sort key of writing: group by group. Lists that only grow come first, from the top down, then the
    others, from the bottom up. Limits are lowered from the inner to the outer and from the bottom up, before others
    are raised in the opposite order."""
    decision = plan.decision
    knob, depth, grows = decision.knob, decision.cgroup.count("/"), _grows(plan)
    if knob in LIST_KNOBS:
        return GROUP_OF[knob], not grows, 0, depth if grows else -depth
    ranks = _RAISING_ORDER if grows else _LOWERING_ORDER
    return GROUP_OF[knob], grows, ranks.index(knob) if knob in ranks else 0, depth if grows else -depth


def grows_memory(plan: WritePlan) -> bool:
    """Return whether the plan raises the memory limit."""
    return plan.decision.knob is Knob.MEMORY_MAX and _grows(plan)


def lowered_quota(plan: WritePlan) -> int | None:
    """Return the quota in us that the plan sets if it lowers it: no burst may exceed it. None otherwise."""
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
    """Return the cgroups that have an ancestor or a descendant among them."""
    distinct, nested = set(cgroups), set[str]()
    for cgroup in distinct:
        above = cgroup.rpartition("/")[0]
        while above:
            if above in distinct:
                nested |= {cgroup, above}
            above = above.rpartition("/")[0]
    return nested


def with_note(outcome: Outcome, note: str) -> Outcome:
    """Return the outcome with a note before its error."""
    if not note:
        return outcome
    return msgspec.structs.replace(outcome, error="; ".join(filter(None, (note, outcome.error))))


def original_of(decision: Decision, knob: Knob, raw: RawValue) -> OriginalValue:
    """Return the journal entry for a knob of the decision's cgroup."""
    return OriginalValue(cgroup=decision.cgroup, cgroup_id=decision.cgroup_id, knob=knob, raw=raw)


STEP_BYTES = 256 << 20
"""Maximum reduction of a memory limit per write: reclaiming this much page cache takes about 0.1 s, during which the
cycle waits."""
SLACK_BYTES = 8 << 20
"""Page cache that is not counted as reclaimable: of the last few MiB the kernel often finds none and gives up."""
USAGE_FILES = {"v1": "memory.usage_in_bytes", "v2": "memory.current"}
"""File with the memory usage, by cgroup version."""
_CACHE_KEYS = {"v1": ("total_inactive_file", "total_active_file"), "v2": ("inactive_file", "active_file")}
_UNRECLAIMABLE_KEYS = {
    "v1": ("total_dirty", "total_writeback", "total_unevictable"),
    "v2": ("file_dirty", "file_writeback", "unevictable"),
}
STEPPED_KNOBS = (Knob.MEMORY_MAX, Knob.MEMORY_HIGH)
"""Limits above which the kernel reclaims synchronously during the write."""
_OWNER_LIMITED_KNOBS = (Knob.MEMORY_MAX, Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN, Knob.SWAP_MAX, Knob.IO_MAX)


def limits_of(
    decision: Decision, requested: str, before: str, files: KnobWriter, state: CycleState, own: str
) -> KnobLimits:
    """Return the limits of a decision; `own` is the owner's value, `before` the current one. Raises Unavailable."""
    cgroup, knob = decision.cgroup, decision.knob
    limits = KnobLimits(cpu_count=state.cpu_count, empty_inherits_parent=files.version == "v2")
    if knob in LIST_KNOBS:
        parent = (cgroup.rpartition("/")[0], knob)
        if parent in state.lists:
            # A cgroup below a container follows it, restricted to the CPUs that its owner set.
            parent_cpus, own_cpus = parse_cpu_list(state.lists[parent]), set(parse_cpu_list(own))
            return replace(limits, allowed=tuple(cpu for cpu in parent_cpus if cpu in own_cpus) or parent_cpus)
        if parent not in state.parent_lists:
            state.parent_lists[parent] = files.allowed_above(cgroup, knob)
        return replace(limits, allowed=state.parent_lists[parent])
    if knob is Knob.QUOTA:
        return replace(limits, own_quota=own)
    if knob is Knob.BURST:
        quota = state.quotas.get(cgroup) or files.read(cgroup, decision.cgroup_id, Knob.QUOTA)
        return replace(limits, quota=quota)
    if knob in (Knob.WEIGHT, Knob.IO_WEIGHT):
        return replace(limits, weights=files.weights(cgroup, knob))
    floor = 0
    if knob in STEPPED_KNOBS and smaller_size(requested, before) == requested != before:
        floor = floor_bytes(decision, int(requested), files)
    return replace(limits, own=own if knob in _OWNER_LIMITED_KNOBS else None, floor_bytes=floor)


def owner_value(
    decision: Decision,
    reading: KnobReading,
    modified: str | None,
    files: KnobWriter,
    originals: OriginalsJournal | None,
) -> str:
    """Return the owner's value: the externally `modified` one, the journalled original, or the value just read."""
    entry = originals.find(decision.cgroup, decision.cgroup_id, decision.knob) if originals else None
    if modified is not None:
        return modified
    raw = reading.raw if entry is None else entry.raw
    return files.decode(decision.cgroup, decision.knob, raw, reading.context)


def floor_bytes(decision: Decision, requested_bytes: int, files: KnobWriter) -> int:
    """Return the lowest memory limit that the kernel can reach without killing a process. It is the usage without
    half of the clean page cache: the other half is a margin for growth during the write. A limit is therefore
    lowered in steps, one per cycle. memory.high kills no process: only the step size applies."""
    cgroup, cgroup_id = decision.cgroup, decision.cgroup_id
    try:
        used_bytes = parse_number(files.read_text(cgroup, cgroup_id, "memory", USAGE_FILES[files.version]))
        if used_bytes <= requested_bytes:
            return 0
        if decision.knob is Knob.MEMORY_HIGH:
            return round_up_to_pages(max(used_bytes - STEP_BYTES, 0))
        stat = _parse_memory_stat(files.read_text(cgroup, cgroup_id, "memory", "memory.stat"))
    except ValueError as error:
        raise Unavailable(f"{cgroup}: its memory usage cannot be read: {error}", "see its memory.stat") from None
    cache_bytes = sum(stat.get(key, 0) for key in _CACHE_KEYS[files.version])
    reclaimable_bytes = max(
        cache_bytes - sum(stat.get(key, 0) for key in _UNRECLAIMABLE_KEYS[files.version]) - SLACK_BYTES, 0
    )
    return round_up_to_pages(used_bytes - min(reclaimable_bytes // 2, STEP_BYTES))


def _parse_memory_stat(text: str) -> Mapping[str, int]:
    pairs = (line.partition(" ") for line in text.splitlines())
    return {key: parse_number(value) for key, _, value in pairs}
