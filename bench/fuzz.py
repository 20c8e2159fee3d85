"""A million damaged kernel texts: does any make a parser raise, or say what cannot be written down.

The texts are those of this machine, as its sources read them, each cut, joined, repeated and sprinkled with what parsers
stumble over. The same seed makes the same texts.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent.hierarchy import detect
from agent.sense import capture, disks, filesystems, machine, numa, parsers, proc_cpu, proc_memory, proc_net
from agent.sense.fields import TABLE
from api.ports import Unavailable

RESULTS = Path(__file__).parent / "results"
Parse = Callable[[bytes], Any]
MOST_CGROUPS = 20
LONGEST = 4096
"""Of a text that is damaged: longer ones are cut, or there would be fewer."""
STUMBLES = (
    b"", b"\n", b" ", b":", b"-1", b"-", b"0", b"9" * 21, b"18446744073709551616", b"nan", b"1e9", b"1_0", b"\x00", b"\xff",
    b"max", b"N0=", b"cpu", b"\xd9\xa3", b"=", b"254:0", b"Node 0, zone", b" kB", b"\t", b"some avg10=",
)  # fmt: skip
NODE: dict[str, tuple[Parse, ...]] = {
    "stat": (lambda text: parsers.cpu_lines(text, 100), parsers.keyed(b"procs_running")),
    "meminfo": (parsers.meminfo,),
    "vmstat": (parsers.flat,),
    "loadavg": (parsers.load_averages,),
    "cpu": (parsers.pressure,),
    "zoneinfo": (proc_memory.zone_lines,),
    "buddyinfo": (lambda text: list(proc_memory.free_blocks(text).items()),),
    "snmp": (proc_net.protocol_counters,),
    "netstat": (proc_net.protocol_counters,),
    "sockstat": (proc_net.socket_counts,),
    "dev": (proc_net.interface_counts,),
    "diskstats": (disks.disk_lines,),
    "interrupts": (proc_cpu.interrupt_counts,),
    "mountinfo": (lambda text: [m.point for m in filesystems.local(filesystems.mounts(text))],),
    "cpuinfo": (proc_cpu.cpuinfo_khz, lambda text: machine.codename(machine.first_cpu(text))),
    "cpulist": (numa.cpus,),
}
"""Parsers of the node's texts by file name; those of cgroups are in the table of their fields."""


def subjects() -> list[tuple[str, Parse, bytes]]:
    """Every parser with a text of this machine that is meant for it."""
    by_name: dict[str, list[Parse]] = {name: list(found) for name, found in NODE.items()}
    for row in TABLE.values():
        for place in (*row.v1, *row.v2):
            by_name.setdefault(place.file.decode(), []).append(place.parse)
    texts: dict[str, bytes] = {}
    for path, text in (*capture.node(Path("/proc"), Path("/sys")), *capture.cgroups(detect(), MOST_CGROUPS)):
        if text and len(text) > len(texts.get(path.name, b"")):
            texts[path.name] = text[:LONGEST]
    return [(name, parse, text) for name, text in sorted(texts.items()) for parse in by_name.get(name, ())]


def damage(text: bytes, chance: random.Random) -> bytes:
    """One to four pieces replaced, left out or repeated."""
    for _ in range(chance.randint(1, 4)):
        start = chance.randint(0, len(text))
        end = min(len(text), start + chance.choice((0, 1, 2, 8, 64, 1024)))
        put = chance.choice(STUMBLES) if chance.random() < 0.7 else text[start:end] * chance.randint(0, 3)
        text = text[:start] + put + text[end:]
    return text[: 2 * LONGEST]


def fuzz(count: int, seed: int) -> tuple[int, list[str]]:
    """How many texts were read, and what went wrong: the parser, the error and the text."""
    chance = random.Random(seed)
    found = subjects()
    faults: list[str] = []
    for index in range(count):
        name, parse, text = found[index % len(found)]
        damaged = damage(text, chance)
        try:
            msgspec.msgpack.encode(parse(damaged))
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            faults.append(f"{name}: {type(error).__name__}: {error}: {damaged!r:.200}")
    return len(found), faults


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for fuzz.md")
    args = parser.parse_args(argv)
    began = time.monotonic()
    try:
        kinds, faults = fuzz(args.count, args.seed)
    except (Unavailable, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for fault in faults[:20]:
        print(f"bench: {fault}", file=sys.stderr)
    text = (
        f"## Fuzzing\n\n{args.count} damaged texts of {kinds} kinds (seed {args.seed}) were read in "
        f"{time.monotonic() - began:.0f} s; {len(faults)} made a parser raise or say what cannot be written down.\n"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "fuzz.md").write_text(text)
    print(text)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
