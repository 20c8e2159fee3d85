"""The probe's pure parts; what it sees is in tests/kernel/test_oomkill.py."""

from __future__ import annotations

import numpy as np
import pytest

from api.snapshot import OomVictim
from probes import bpf
from probes.maps import dtype_of
from probes.oomkill import _FORMS, FORMS, RING_VICTIMS, decode

# As BCC describes `struct victim` of the C source.
VICTIM = ["victim", [["at_ns", "unsigned long long"], ["cgroup_id", "unsigned long long"],
                     ["pid", "unsigned long long"], ["command", "char", [16]]], "struct"]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (b"java", "java"),
        (b"exactly-15-chars", "exactly-15-chars"),
        (b"a\0leftover", "a"),
        (b"\xff\n", "\N{REPLACEMENT CHARACTER}\n"),
        (b"", ""),
    ],
)
def test_a_victim_has_its_time_cgroup_number_and_name(command: bytes, text: str) -> None:
    row = np.zeros(1, dtype_of(VICTIM))[0]
    row["at_ns"], row["cgroup_id"], row["pid"] = 5, 77, 4321
    row["command"] = np.frombuffer(command.ljust(16, b"\0"), "i1")
    assert decode(row, 1000, "/a") == OomVictim(wall_time_ns=1005, cgroup="/a", pid=4321, command=text)


def test_the_ring_is_a_power_of_two_because_the_source_masks_with_it() -> None:
    assert RING_VICTIMS & (RING_VICTIMS - 1) == 0


def test_programs_can_be_found_in_the_kernels_list() -> None:
    assert tuple(_FORMS) == FORMS
    for form in _FORMS.values():
        assert all(p.name.startswith("dtse_") and len(p.name) < bpf.NAME_BYTES for p in form.programs)
