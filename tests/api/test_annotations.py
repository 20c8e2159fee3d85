"""Service profiles from annotations: what cannot be read protects the pod, and ends nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.annotations import PROFILE_KEY, parse_service_profile


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", '{"memoryOffloading": ' + "[" * 5000 + "]" * 5000 + "}", '"\ud800"',
     '{"targets": {"x": {"upper": NaN}}}', '{"targets": {"x": {"upper": 1e999}}}',
     '{"disableReclaimLevel": "Rack"}', '{"target": {}}'],
    ids=["nothing", "null", "a list", "too deep", "half a character", "no number", "endless", "no level", "no such field"],
)  # fmt: skip
def test_an_unreadable_annotation_reclaims_nothing_and_is_reported(text: str) -> None:
    profile, problems = parse_service_profile({PROFILE_KEY: text})
    assert profile.disable_reclaim_level == "Pod"
    assert len(problems) == 1
    assert "until then nothing of the pod is reclaimed" in problems[0]


@given(st.text() | st.text(alphabet='{}[]":,0123456789.eE+-targetsuplowr_ \\', max_size=80))
def test_no_text_ends_anything(text: str) -> None:
    profile, problems = parse_service_profile({PROFILE_KEY: text})
    assert bool(problems) <= (not profile.reclaimable)


def test_a_pod_without_annotation_is_reclaimable() -> None:
    assert parse_service_profile({})[0].reclaimable
