"""When a pod got its node, from the conditions that the kubelet lists."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agent.sensors.pods.pod_conditions import KubeletPodCondition, is_resize_pending, placement_time_s

SCHEDULED = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2027-01-15T08:00:00Z"}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (SCHEDULED, 1_800_000_000),
        ({**SCHEDULED, "status": "False"}, None),
        ({**SCHEDULED, "type": "Ready"}, None),
        ({**SCHEDULED, "lastTransitionTime": None}, None),
        ({**SCHEDULED, "lastTransitionTime": "yesterday"}, None),
    ],
    ids=["scheduled", "not yet", "another", "no time", "no timestamp"],
)
def test_the_time_of_placement_is_that_of_the_condition(condition: dict[str, Any], expected: float | None) -> None:
    conditions = msgspec.convert([{"type": "Initialized"}, condition], list[KubeletPodCondition])
    assert placement_time_s(conditions) == expected
    assert not is_resize_pending(conditions)
