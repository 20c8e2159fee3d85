"""What a round is going to write, and in which order the kernel can take it. Nothing is read or written here."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from agent.qrm.bounds import ratio
from agent.qrm.knobs import Original, RawValue, canonical
from agent.qrm.notation import MAX
from agent.qrm.restore import GROUP_OF, LISTS, ORDER
from api.cpus import parse_cpu_list
from api.decisions import Decision, Outcome, Status
from api.knobs import Knob
from api.ports import Unavailable, Vanished

_SIZES = (Knob.MEMORY_MAX, Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN, Knob.SWAP_MAX)
_INWARDS = (
    Knob.BURST, Knob.QUOTA,
    Knob.MEMORY_MIN, Knob.MEMORY_LOW, Knob.MEMORY_HIGH, Knob.MEMORY_MAX, Knob.SWAP_MAX,
)  # fmt: skip
"""Order in which limits of one cgroup are lowered: the inner before the outer."""
_OUTWARDS = (
    Knob.QUOTA, Knob.BURST,
    Knob.MEMORY_MAX, Knob.SWAP_MAX, Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN,
)  # fmt: skip
"""Order in which they are raised. Swap always follows memory: version 1 counts it from there."""


class Plan(msgspec.Struct, frozen=True):
    """A decision that changes a knob, or only its original because somebody else has set the knob so already."""

    decision: Decision
    before: str
    raw: RawValue
    clamped_from: str | None = None
    drifted: bool = False
    """Whether the knob was as decided and is not any more."""
    burst: Original | None = None
    """The group's burst, where it is more than the quota that this plan sets."""

    @property
    def changes(self) -> bool:
        """Whether anything has to be written."""
        return self.before != canonical(self.decision.knob, self.decision.value)

    def outcome(self, status: Status, *, after: str | None = None, error: str = "") -> Outcome:
        """What came of it."""
        return Outcome(
            decision=self.decision,
            status=status,
            before=self.before,
            after=after,
            error=error,
            clamped_from=self.clamped_from,
            repaired=self.drifted and status is Status.APPLIED,
        )


class RoundState(msgspec.Struct):
    """What this round has settled so far that later decisions depend on."""

    cpu_count: int
    loosened: frozenset[str] = frozenset()
    """Cgroups whose quota may go above the owner's."""
    idle: dict[str, bool] = {}
    lists: dict[tuple[str, Knob], str] = {}
    """CPUs and NUMA nodes by cgroup and knob."""
    ceilings: dict[tuple[str, Knob], tuple[int, ...] | None] = {}
    """What the kernel says of those that nobody decides on."""
    quotas: dict[str, str] = {}

    def settle(self, cgroup: str, knob: Knob, value: str) -> None:
        """That knob is going to have this value."""
        if knob in LISTS and value:
            self.lists[cgroup, knob] = value
        elif knob is Knob.IDLE:
            self.idle[cgroup] = value == "1"
        elif knob is Knob.QUOTA:
            self.quotas[cgroup] = value


def planning_order(decision: Decision) -> tuple[int, int]:
    """Parents first: a cpuset is clamped to what the one above will have."""
    return ORDER.index(decision.knob), decision.cgroup.count("/")


def writing_order(plan: Plan) -> tuple[int, bool, int, int]:
    """Group by group. Lists that only gain come first, from the top down, then the others, from the bottom up; limits are
    lowered from the inner to the outer and from the bottom up, before others are raised the other way round."""
    decision = plan.decision
    knob, depth, grows = decision.knob, decision.cgroup.count("/"), _grows(plan)
    if knob in LISTS:
        return GROUP_OF[knob], not grows, 0, depth if grows else -depth
    ranks = _OUTWARDS if grows else _INWARDS
    return GROUP_OF[knob], grows, ranks.index(knob) if knob in ranks else 0, depth if grows else -depth


def grows_memory(plan: Plan) -> bool:
    """Whether more memory is going to be allowed than before."""
    return plan.decision.knob is Knob.MEMORY_MAX and _grows(plan)


def lowered_quota(plan: Plan) -> int | None:
    """Microseconds of a quota that this plan sets, if they are fewer than before: no burst may exceed them."""
    if plan.decision.knob is not Knob.QUOTA:
        return None
    quota, before = canonical(Knob.QUOTA, plan.decision.value).split()[0], plan.before.split()[0]
    return None if quota == MAX or (before != MAX and int(quota) >= int(before)) else int(quota)


def _grows(plan: Plan) -> bool:
    knob, before, value = plan.decision.knob, plan.before, canonical(plan.decision.knob, plan.decision.value)
    if knob in LISTS:
        return set(parse_cpu_list(before)) <= set(parse_cpu_list(value))
    if knob is Knob.QUOTA:
        return ratio(value) >= ratio(before)
    if knob in _SIZES:
        return value == MAX or (before != MAX and int(value) >= int(before))
    return knob is not Knob.BURST or int(value) >= int(before)


def nested(cgroups: Collection[str]) -> set[str]:
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


def original(decision: Decision, knob: Knob, raw: RawValue) -> Original:
    """What a knob of the decision's cgroup holds, as it is journalled."""
    return Original(cgroup=decision.cgroup, cgroup_id=decision.cgroup_id, knob=knob, raw=raw)


def failed(
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
        status=Status.VANISHED if vanished else Status.REFUSED,
        before=before,
        after=after,
        error=f"{error.reason}: {error.remedy}" if isinstance(error, Unavailable) else str(error),
        clamped_from=clamped_from,
    )
