"""The probe's pure parts; what it measures is in tests/kernel/test_throttles.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from api.histogram import SLOT_COUNT
from probes import bpf
from probes.per_cgroup_probe import NO_DURATIONS
from probes.throttles import _FORMS, FORMS, decode, job


@given(st.lists(st.integers(0, 2**40), min_size=SLOT_COUNT, max_size=SLOT_COUNT), st.integers(0, 2**63))
def test_a_row_is_the_sum_and_then_the_slots(slots: list[int], sum_ns: int) -> None:
    throttles = decode({7: [sum_ns, *slots]})[7]
    assert (throttles.sum_ns, throttles.count, throttles.slots) == (sum_ns, sum(slots), tuple(slots))
    assert decode({7: [0] * (1 + SLOT_COUNT)}) == {7: NO_DURATIONS}


def test_programs_can_be_found_in_the_kernels_list() -> None:
    assert tuple(_FORMS) == FORMS
    assert [form.name for form in job(FORMS, 2).forms] == list(FORMS)
    for form in _FORMS.values():
        assert all(p.name.startswith("dtse_") and len(p.name) < bpf.NAME_BYTES for p in form.programs)
