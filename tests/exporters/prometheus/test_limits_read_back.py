"""What the agent has written is shown at once, although files of limits are read seldom."""

from __future__ import annotations

import msgspec
import pytest

from api.decision import Decision, Outcome, OutcomeStatus
from api.knobs import Knob, Reason
from exporters.prometheus.families import with_limits_read_back
from tests.builders.four_cpu_node import busy_cycle


def outcome(
    knob: Knob, after: str | None, status: OutcomeStatus = OutcomeStatus.APPLIED, cgroup: str = "/batch"
) -> Outcome:
    decision = Decision(
        cgroup=cgroup, cgroup_id=1, pod="default/batch", knob=knob, value="x", reason=Reason(rule="r", text="t")
    )
    return Outcome(decision=decision, status=status, after=after)


@pytest.mark.parametrize(
    ("created", "field", "expected"),
    [
        (outcome(Knob.QUOTA, "36000 100000"), "quota_us", 36_000),
        (outcome(Knob.QUOTA, "max 200000"), "quota_us", -1),
        (outcome(Knob.QUOTA, "36000 200000", OutcomeStatus.UNCHANGED), "period_us", 200_000),
        (outcome(Knob.IDLE, "1"), "idle", True),
        (outcome(Knob.CPUSET, "1-2"), "cpus", "1-2"),
        (outcome(Knob.MEMORY_MAX, "4096"), "memory_max_bytes", 4096),
    ],
)
def test_what_was_read_back_is_shown(created: Outcome, field: str, expected: object) -> None:
    finished = msgspec.structs.replace(busy_cycle(2), outcomes=(created,))
    assert getattr(with_limits_read_back(finished).cgroups["/batch"].limits, field) == expected


@pytest.mark.parametrize(
    "created",
    [
        outcome(Knob.QUOTA, "36000 100000", OutcomeStatus.DRY_RUN),
        outcome(Knob.QUOTA, "36000 100000", OutcomeStatus.MISMATCH),
        outcome(Knob.QUOTA, None),
        outcome(Knob.QUOTA, "36000 100000", cgroup="/gone"),
    ],
)
def test_what_was_not_is_not(created: Outcome) -> None:
    finished = msgspec.structs.replace(busy_cycle(2), outcomes=(created,))
    assert with_limits_read_back(finished) is finished.snapshot
