"""Feeds a million damaged kernel files to every parser: none may raise or return what cannot be encoded. Then hostile
annotations, names and answers (bench/fuzz_outside.py), whose cost in CPU time and memory is compared with their size."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent.offline import capture
from agent.sensors import parsers
from agent.sensors.cgroup.cgroup_files import FIELD_TABLE
from agent.sensors.cgroup.hierarchy import detect_hierarchy, parse_mountinfo
from agent.sensors.node import machine, node_cpu, node_disks, node_memory, node_network
from api.interfaces import Unavailable
from bench.fuzz_outside import fuzz_outside
from bench.machine import bench_parser, write_results

Parse = Callable[[bytes], Any]
MAX_CGROUPS = 20
MAX_TEXT_BYTES = 4096
"""Longer texts are cut before they are damaged, so that more texts can be tested."""
HARD_TOKENS = (
    b"", b"\n", b" ", b":", b"-1", b"-", b"0", b"9" * 21, b"18446744073709551616", b"nan", b"1e9", b"1_0", b"\x00", b"\xff",
    b"max", b"N0=", b"cpu", b"\xd9\xa3", b"=", b"254:0", b"Node 0, zone", b" kB", b"\t", b"some avg10=",
)  # fmt: skip
NODE: dict[str, tuple[Parse, ...]] = {
    "stat": (lambda text: parsers.cpu_lines(text, 100), parsers.keyed(b"procs_running")),
    "meminfo": (parsers.meminfo,),
    "vmstat": (parsers.flat,),
    "loadavg": (parsers.load_averages,),
    "cpu": (parsers.pressure,),
    "zoneinfo": (node_memory.parse_zoneinfo,),
    "buddyinfo": (lambda text: list(node_memory.parse_buddyinfo(text).items()),),
    "snmp": (node_network.parse_protocol_counters,),
    "netstat": (node_network.parse_protocol_counters,),
    "sockstat": (node_network.parse_sockstat,),
    "dev": (node_network.parse_net_dev,),
    "diskstats": (node_disks.parse_diskstats,),
    "interrupts": (node_cpu.parse_interrupts,),
    "mountinfo": (lambda text: [m.point for m in node_disks.local_mounts(parse_mountinfo(text))],),
    "cpuinfo": (node_cpu.parse_cpuinfo_khz, lambda text: machine.cpu_codename(machine.parse_first_cpu(text))),
    "cpulist": (lambda text: machine.parse_cpus(text.decode("ascii", "replace")),),
}
"""Parsers of the node's files by file name; those of cgroups are in FIELD_TABLE."""


def parser_inputs() -> list[tuple[str, Parse, bytes]]:
    """Return every parser with a text of this machine in its format."""
    by_name: dict[str, list[Parse]] = {name: list(parsers_of_file) for name, parsers_of_file in NODE.items()}
    for row in FIELD_TABLE.values():
        for place in (*row.v1, *row.v2):
            by_name.setdefault(place.file.decode(), []).append(place.parse)
    texts: dict[str, bytes] = {}
    for path, text in (
        *capture.capture_node(Path("/proc"), Path("/sys")),
        *capture.capture_cgroups(detect_hierarchy(), MAX_CGROUPS),
    ):
        if text and len(text) > len(texts.get(path.name, b"")):
            texts[path.name] = text[:MAX_TEXT_BYTES]
    return [(name, parse, text) for name, text in sorted(texts.items()) for parse in by_name.get(name, ())]


def damage(text: bytes, chance: random.Random) -> bytes:
    """Replace, delete or repeat one to four pieces of the text."""
    for _ in range(chance.randint(1, 4)):
        start = chance.randint(0, len(text))
        end = min(len(text), start + chance.choice((0, 1, 2, 8, 64, 1024)))
        put = chance.choice(HARD_TOKENS) if chance.random() < 0.7 else text[start:end] * chance.randint(0, 3)
        text = text[:start] + put + text[end:]
    return text[: 2 * MAX_TEXT_BYTES]


def fuzz(count: int, seed: int) -> tuple[int, list[str]]:
    """Return the number of parser inputs, and the failures: parser, error and text."""
    chance = random.Random(seed)
    inputs = parser_inputs()
    faults: list[str] = []
    for index in range(count):
        name, parse, text = inputs[index % len(inputs)]
        damaged = damage(text, chance)
        try:
            msgspec.msgpack.encode(parse(damaged))
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            faults.append(f"{name}: {type(error).__name__}: {error}: {damaged!r:.200}")
    return len(inputs), faults


def report_outside(count: int, seed: int) -> tuple[str, list[str]]:
    """Measure inputs from outside; return the section about them, and the failures."""
    worst: dict[str, tuple[float, float]] = {}
    faults: list[str] = []
    for result in fuzz_outside(count, seed):
        problem = result if isinstance(result, str) else result.problem()
        if problem:
            faults.append(problem)
        if not isinstance(result, str):
            used = (result.cpu_ns / result.allowed_ns, result.peak_bytes / result.allowed_bytes)
            cpu, memory = worst.get(result.name, (0.0, 0.0))
            worst[result.name] = (max(cpu, used[0]), max(memory, used[1]))
    rows = "".join(f"| {name} | {cpu:.0%} | {memory:.0%} |\n" for name, (cpu, memory) in sorted(worst.items()))
    text = (
        f"\n{count} hostile inputs from outside were parsed (seed {seed}); {len(faults)} failed or cost more than allowed. "
        f"Largest share of the allowed cost:\n\n| input | CPU time | memory |\n|---|---|---|\n{rows}"
    )
    return text, faults


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("fuzz", __doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--outside-count", type=int, default=20_000, help="inputs from outside whose cost is measured")
    parser.add_argument("--seed", type=int, default=1)
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
        f"{time.monotonic() - began:.0f} s; {len(faults)} made a parser raise or return a value that cannot be encoded.\n"
    )
    outside, outside_faults = report_outside(args.outside_count, args.seed)
    for fault in outside_faults[:20]:
        print(f"bench: {fault}", file=sys.stderr)
    faults += outside_faults
    text += outside
    write_results(args.out, "fuzz", text)
    print(text)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
