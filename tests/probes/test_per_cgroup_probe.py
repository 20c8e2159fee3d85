"""Sizes of the per-CPU tables of cgroups, and the number of cgroups that have slots without loss."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from api.histogram import SLOT_COUNT
from api.units import MIB
from probes import counters, runqlat, sockets, throttles, wakeups
from probes.cgroup_pairs import BLAME_PARTS
from probes.per_cgroup_probe import MAX_CGROUP_SLOTS, cgroup_slots

WAITS, THROTTLES, SOCKETS, COUNTERS, WAKEUPS = 288, 240, 72, 24, 672
SOURCE = (Path(runqlat.__file__).parent / "per_cgroup.bpf.h").read_text()


@pytest.mark.parametrize(
    ("cpus", "value_bytes", "places", "mib"),
    [
        (1, WAITS, 4096, 1),
        (2, WAITS, 4096, 2),
        (64, WAITS, 3640, 64),
        (128, WAITS, 1820, 64),
        (256, WAITS, 1820, 128),
        (512, WAITS, 1820, 256),
        (64, THROTTLES, 4096, 60),
        (128, THROTTLES, 2184, 64),
        (256, THROTTLES, 2184, 128),
        (512, THROTTLES, 2184, 256),
        (64, SOCKETS, 4096, 18),
        (512, SOCKETS, 4096, 144),
        (64, COUNTERS, 4096, 6),
        (512, COUNTERS, 4096, 48),
        (64, WAKEUPS, 1560, 64),
        (128, WAKEUPS, 780, 64),
        (512, WAKEUPS, 780, 256),
    ],
)
def test_the_tables_are_as_large_as_the_docstring_says(cpus: int, value_bytes: int, places: int, mib: int) -> None:
    assert cgroup_slots(cpus, value_bytes) == places <= MAX_CGROUP_SLOTS
    assert round(places * cpus * value_bytes / MIB) == mib


def test_the_values_are_as_large_as_that() -> None:
    assert 8 * (1 + SLOT_COUNT + BLAME_PARTS) + 40 == WAITS
    assert 8 * (3 + SLOT_COUNT) == THROTTLES
    assert 8 * sockets.TRAFFIC_COUNTERS == SOCKETS
    assert 8 * len(counters.EVENTS) == COUNTERS
    assert 8 * 3 * (1 + SLOT_COUNT) == WAKEUPS


def count_without_slot(tags: Iterable[int], places: int) -> int:
    """Return the number of cgroups whose window is full; the same algorithm as cgroup_slot_for() of per_cgroup.bpf.h."""
    window = int(re.findall(r"#define WINDOW (\d+)", SOURCE)[0])
    used: set[int] = set()
    lost = 0
    for tag in tags:
        home = ((tag * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 32) * places >> 32
        free = next((at for k in range(window) if (at := (home + k) % places) not in used), None)
        lost += free is None
        used |= set() if free is None else {free}
    return lost


def tables(cpus: int) -> dict[str, int]:
    """Return the number of slots of every probe with a per-CPU table."""
    jobs = {
        "runqlat": runqlat.job(runqlat.FORMS, cpus, blame=True),
        "throttles": throttles.job(throttles.FORMS, cpus),
        "sockets": sockets.job(sockets.FORMS, cpus),
        "counters": counters.job(counters.FORMS, range(cpus), counters.EVENTS),
        "wakeups": wakeups.job(wakeups.FORMS, cpus),
    }
    return {name: job.constants["CGROUP_SLOTS"] for name, job in jobs.items()}


DOCUMENTED = Path(runqlat.__file__).parents[1] / "docs/operations.md"


@pytest.mark.parametrize("cpus", [2, 64, 128, 256, 512])
def test_the_documented_memory_of_all_probes_is_right(cpus: int) -> None:
    """Probes that are loaded by default. Task slots and shared tables do not grow with CPUs: 13 MiB."""
    places = tables(cpus)
    per_cpu = sum(cpus * places[name] * size for name, size in zip(places, (WAITS, THROTTLES, SOCKETS), strict=False))
    created = runqlat.job(runqlat.FORMS, cpus, blame=True).constants
    timelines = cpus * (6 * 8 + 16 * created["SPANS"] + 72 * created["STRETCHES"])
    mib = round((per_cpu + timelines + (16 * cpus << created["PAIR_BITS"])) / MIB) + 13
    (reported,) = re.findall(rf"^\| {cpus} \| (\d+) MiB \|", DOCUMENTED.read_text(), re.MULTILINE)
    assert int(reported) == mib


@pytest.mark.parametrize("cpus", [2, 64, 128, 256, 512])
@pytest.mark.parametrize(
    ("probe", "groups"), [("runqlat", 600), ("throttles", 600), ("sockets", 600), ("counters", 600), ("wakeups", 260)]
)
def test_the_documented_number_of_cgroups_has_slots_on_any_machine(probe: str, groups: int, cpus: int) -> None:
    """Whichever serial numbers they have: scattered over a million cgroups that came and went, or one after the other."""
    places = tables(cpus)[probe]
    for seed in range(20):
        assert count_without_slot(random.Random(seed).sample(range(1_000_000), groups), places) == 0
    assert count_without_slot(range(1000, 1000 + 3 * groups, 3), places) == 0


def test_a_half_full_table_loses_cgroups_on_some_nodes() -> None:
    """Why the tables are three times as large as what they are to hold: the simulation above can fail."""
    lost = [count_without_slot(random.Random(seed).sample(range(1_000_000), 910), 1820) for seed in range(20)]
    assert 0 < sum(map(bool, lost)) < 20
