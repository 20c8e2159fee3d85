"""The probe's pure parts; what it measures is in tests/kernel/test_runqlat.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from api.histogram import SLOT_COUNT
from probes import bpf
from probes.runqlat import _FORMS, FORMS, TASK_SLOTS, TIMELINE_SPANS, TIMELINE_STRETCHES, decode, job


@given(st.lists(st.integers(0, 2**63), min_size=SLOT_COUNT, max_size=SLOT_COUNT), st.integers(0, 2**63))
def test_a_row_is_the_sum_and_then_the_slots(slots: list[int], sum_ns: int) -> None:
    wait = decode([7], [[sum_ns, *slots]])[7]
    assert (wait.sum_ns, wait.count, wait.slots) == (sum_ns, sum(slots), tuple(slots))


def test_every_form_is_known_in_the_order_of_its_cost() -> None:
    assert FORMS == tuple(_FORMS) == ("tp_btf", "raw_tp", "classic")
    assert [form.name for form in job(FORMS, 2).forms] == list(FORMS)
    assert [form.typed for form in job(FORMS, 2).forms] == [True, False, False]


def test_program_names_are_unique_and_short_enough_for_the_kernel() -> None:
    for form in _FORMS.values():
        names = [program.name for program in form.programs]
        assert len(set(names)) == len(names)
        assert all(name.startswith("dtse_") and len(name) < bpf.NAME_BYTES for name in names)


def test_seats_are_a_power_of_two_because_the_source_masks_with_them() -> None:
    assert TASK_SLOTS & (TASK_SLOTS - 1) == 0


def test_with_blame_each_form_that_knows_it_is_tried_with_it_first_and_then_without() -> None:
    tried = job(FORMS, 2, blame=True).forms
    assert [(form.name, "BLAME" in form.constants) for form in tried] == [
        ("tp_btf", True),
        ("tp_btf", False),
        ("raw_tp", True),
        ("raw_tp", False),
        ("classic", False),
    ]
    assert all(("pairs" in form.maps) == ("BLAME" in form.constants) for form in tried)


def test_spans_and_stretches_are_powers_of_two_because_the_source_masks_with_them() -> None:
    assert TIMELINE_SPANS & (TIMELINE_SPANS - 1) == TIMELINE_STRETCHES & (TIMELINE_STRETCHES - 1) == 0
