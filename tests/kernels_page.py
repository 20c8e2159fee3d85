"""Reads docs/kernels.md as data, and the same facts from the code, for the tests that compare them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from probes import (
    blockio,
    counters,
    kswapd,
    migrations,
    oomkill,
    runqlat,
    sockets,
    softirq,
    threads,
    throttles,
    wakeups,
)
from probes.loader import Form, Job, Program

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/kernels.md"
Version = tuple[int, int]
ALWAYS, NEVER_AGAIN = (0, 0), (99, 0)

JOBS: Mapping[str, Job] = {
    "runqlat": runqlat.job(runqlat.FORMS, 4),
    "blame": runqlat.job(("tp_btf", "raw_tp"), 4, blame=True),
    "blockio": blockio.job(blockio.FORMS),
    "sockets": sockets.job(sockets.FORMS, 4),
    "softirq": softirq.job(softirq.FORMS),
    "kswapd": kswapd.job(kswapd.FORMS, (0,)),
    "oomkill": oomkill.job(oomkill.FORMS),
    "threads": threads.job(),
    "throttles": throttles.job(throttles.FORMS, 4),
    "migrations": migrations.job(migrations.FORMS, 4),
    "wakeups": wakeups.job(wakeups.FORMS, 4),
    "counters": counters.job(counters.FORMS, (0, 1), counters.EVENTS),
}
"""Jobs of the compiling child, by probe."""


class Kernels(NamedTuple):
    """The mainline versions that have something, both included."""

    first: Version
    last: Version = NEVER_AGAIN

    def __contains__(self, version: object) -> bool:
        return isinstance(version, tuple) and self.first <= version <= self.last


def version(text: str) -> Version:
    """`6.1` of `6.1.0-40-amd64`."""
    major, minor = text.partition("-")[0].split(".")[:2]
    return int(major), int(minor)


def kernels(cell: str) -> Kernels:
    """`5.5`, `to 5.10` or `6.2 to 6.14`; what follows a comma is for people."""
    first, _, last = cell.partition(",")[0].partition("to")
    return Kernels(version(first) if first.strip() else ALWAYS, version(last) if last else NEVER_AGAIN)


def tables(title: str) -> list[list[list[str]]]:
    """The tables below a heading: their rows as cells, the head first."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    blocks = [block.splitlines() for block in re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE)]
    cells = [[[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block] for block in blocks]
    return [[rows[0], *rows[2:]] for rows in cells]


def named(cell: str) -> list[str]:
    """What is spelled as code in it."""
    return re.findall(r"`([^`]+)`", cell)


def probes(cell: str) -> set[str]:
    """`one`, `other`, or all but those; in which of their forms is for people."""
    return set(JOBS) - set(named(cell)) if cell.startswith("all but") else set(named(cell))


def alternatives(cell: str) -> Iterator[tuple[str, ...]]:
    """Fields: each with those that take its place on other kernels."""
    for part in cell.split(", "):
        codes = named(part)
        if codes:
            yield tuple(f"per-CPU {code}" if part.startswith("per-CPU") else code for code in codes)


def spelled(places: object) -> tuple[str, ...]:
    """Alternatives of a form, as the page spells them."""
    assert isinstance(places, list | tuple)
    return tuple(f"{struct}.{member}" if struct else f"per-CPU {member}" for struct, member, _ in places)


def event(program: Program) -> str:
    """What runs a program, and what it must be passed."""
    if program.iterator:
        return f"bpf_iter_{program.tracepoint}"
    return f"{program.tracepoint}({', '.join(program.arguments)})"


def programs(name: str) -> Iterator[tuple[Form, Program]]:
    """Every program of every form of a probe."""
    return ((form, program) for form in JOBS[name].forms for program in form.programs)


def came() -> dict[str, Kernels]:
    """Each thing under `What came when`, by its name."""
    return {
        f"per-CPU {code}" if what.startswith("per-CPU") else code: kernels(when)
        for what, when, _ in tables("What came when")[0][1:]
        for code in named(what)
    }
