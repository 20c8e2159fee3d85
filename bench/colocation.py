"""THE bench: an open-loop online service from 10 to 60 % of the node beside twice as many burners as CPUs, in every mode.

One run, cells shuffled within each round, so that a slow minute of the machine hits no mode more than another; every
ratio is between medians of the same run. Writes JSON, a Markdown table and a chart to bench/results.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agent.hierarchy import detect
from api.facts import Wait
from api.ports import Unavailable, WaitSource
from bench.cell import AGENT_WARMUP_S, WARMUP_S, Bed, Measured, measure
from bench.machine import end_cleanly_on_sigterm, node_times, this_machine
from bench.modes import BY_NAME, DEFAULT_MODES, ONLINE
from bench.reaction import react
from bench.report import Reaction, Results, markdown, svg
from demo.workloads import own_cpus, size_for

RESULTS = Path(__file__).parent / "results"
QUIET_OTHERS, QUIET_STOLEN, TRIES = 0.03, 0.005, 4
"""A cell in which other processes, or the hypervisor, took more of the node is measured again, so often in all at most."""
QUIET_WITHIN_S = 120.0
LOADS = (0.1, 0.2, 0.4, 0.6)


def options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.colocation", description=__doc__)
    parser.add_argument("--modes", type=_names, default=DEFAULT_MODES, help=f"of {', '.join(BY_NAME)}")
    parser.add_argument("--loads", type=_percents, default=LOADS, help="percent of the node, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="measured time of a cell, after its warm-up")
    parser.add_argument("--spikes", type=int, default=8, help="spikes of the reaction test; 0 leaves it out")
    parser.add_argument("--waits", action="store_true", help="also read the online cgroup's run-queue wait")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round of 2 s cells at 20 and 60 %%, two spikes, however busy the machine is",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for colocation.json, .md and .svg")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.seconds, args.loads, args.spikes = 1, 2.0, (0.2, 0.6), min(args.spikes, 2)
    return args


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in BY_NAME]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(BY_NAME)}")
    return names


def _percents(text: str) -> tuple[float, ...]:
    loads = tuple(float(part) / 100 for part in text.split(","))
    if not all(0 < load < 1 for load in loads):
        raise argparse.ArgumentTypeError("loads are percents between 0 and 100, for example 10,20,40,60")
    return loads


def run(args: argparse.Namespace, bed: Bed) -> tuple[list[Measured], list[str]]:
    """All cells in shuffled rounds; a cell that fails is named and the others go on."""
    order = random.Random(args.seed)
    cells: list[Measured] = []
    failures: list[str] = []
    total = args.rounds * len(args.modes) * len(args.loads)
    for number in range(1, args.rounds + 1):
        plan = [(mode, load) for mode in args.modes for load in args.loads]
        order.shuffle(plan)
        for mode, load in plan:
            began, done = time.monotonic(), len(cells) + len(failures) + 1
            try:
                cell = _quiet_cell(bed, mode, load, number, 1 if args.quick else TRIES)
            except (OSError, RuntimeError, Unavailable) as error:
                failures.append(f"{mode} at {load:.0%}, round {number}: {error}")
                print(f"[{done}/{total}] {failures[-1]}", flush=True)
                continue
            cells.append(cell)
            print(f"[{done}/{total}] {_line(cell)} ({time.monotonic() - began:.0f} s)", flush=True)
    return cells, failures


def _quiet_cell(bed: Bed, mode: str, load: float, number: int, tries: int) -> Measured:
    """The cell, measured again while somebody else's work disturbs it; of so many tries the quietest one counts."""
    tried: list[Measured] = []
    for _ in range(tries):
        if tries > 1 and (waited_s := wait_until_quiet()) > 1:
            print(f"  waited {waited_s:.0f} s for others to be quiet", flush=True)
        tried.append(measure(bed, BY_NAME[mode], load, number))
        if _noise(tried[-1]) <= 1:
            break
        print(f"  disturbed, once more: {_line(tried[-1])}", flush=True)
    return min(tried, key=_noise)


def wait_until_quiet() -> float:
    """Return once the node has been nearly idle for a second, or after QUIET_WITHIN_S; how long that took, in seconds."""
    began = time.monotonic()
    while time.monotonic() - began < QUIET_WITHIN_S:
        before = node_times()
        time.sleep(1)
        after = node_times()
        if after.busy - before.busy <= QUIET_OTHERS * (after.total - before.total):
            break
    return time.monotonic() - began - 1


def _noise(cell: Measured) -> float:
    """How disturbed a cell was; above 1 is too much."""
    return max(cell.noise.others / QUIET_OTHERS, cell.noise.stolen / QUIET_STOLEN)


def _line(cell: Measured) -> str:
    text = (
        f"{cell.load:4.0%} {cell.mode:12} p50 {cell.p50_ms:7.2f} p99 {cell.p99_ms:8.2f} p99.9 {cell.p999_ms:8.2f} ms, "
        f"{cell.units_per_s:7,.0f} units/s, node {cell.node_use:4.0%}, stolen {cell.noise.stolen:.1%}, "
        f"others {cell.noise.others:.1%}, lost {cell.lost}, service {cell.online_us:.0f} us, "
        f"client {cell.client_cores:.2f} cores"
    )
    if cell.lending is not None:
        text += f", lent {cell.lending.lent_cores:.2f} cores, {cell.lending.changes} changes"
    if cell.waits is not None:
        text += f", wait mean {cell.waits.mean_ms:.2f} p99 {cell.waits.p99_ms or float('nan'):.2f} ms"
    return text


def reactions(args: argparse.Namespace, bed: Bed) -> list[Reaction]:
    found = []
    for mode in args.modes if args.spikes else ():
        if BY_NAME[mode].agent_config is not None:
            print(f"{mode}: reaction to {args.spikes} spikes", flush=True)
            found.append(react(bed, BY_NAME[mode], args.spikes))
            print(f"  decided after {found[-1].decided_ms} ms, written after {found[-1].written_ms} ms", flush=True)
    return found


def settings(args: argparse.Namespace, bed: Bed) -> str:
    size = bed.size
    return (
        f"Service: {size.workers} workers, {size.service_us} us of CPU a request, Poisson arrivals, open loop; batch: "
        f"{size.burners} burners (SHA-256 of 64 KiB). {args.rounds} shuffled rounds of {args.seconds:g} s a cell after "
        f"{WARMUP_S:g} s of warm-up ({AGENT_WARMUP_S:g} s where the agent runs: it lends step by step). Latency from when a "
        f"request was due to the kernel's timestamp of its reply; a lost request counts with 5 s. The client runs under "
        f"SCHED_FIFO on the same CPUs. A cell in which other processes took more than {QUIET_OTHERS:.0%} of the node, or the "
        f"hypervisor more than {QUIET_STOLEN:.1%}, was measured again, at most {TRIES} times in all. Medians of the rounds; "
        "in a round every mode gets the same arrivals."
    )


def _open_waits() -> WaitSource:
    from probes.runqlat import open_waits  # noqa: PLC0415 - only a bench that is asked for waits needs a probe

    return open_waits()


def main(argv: Sequence[str] | None = None) -> int:
    args = options(sys.argv[1:] if argv is None else argv)
    end_cleanly_on_sigterm()
    source: WaitSource | None = None
    try:
        hierarchy = detect()
        source = _open_waits() if args.waits else None
    except Unavailable as error:
        print(f"bench: {error.reason}\n  remedy: {error.remedy}", file=sys.stderr)
        return 2

    def waits(cgroup_id: int) -> Wait | None:
        return source.read({cgroup_id: f"/{ONLINE}"}).get(cgroup_id) if source else None

    cpus = tuple(sorted(os.sched_getaffinity(0)))
    bed = Bed(hierarchy=hierarchy, cpus=cpus, size=size_for(own_cpus()), seconds=args.seconds, waits=waits)
    cells, failures = run(args, bed)
    results = Results(
        machine=this_machine(hierarchy.mode),
        settings=settings(args, bed),
        cells=tuple(cells),
        reactions=tuple(reactions(args, bed)),
        failures=tuple(failures),
    )
    if source is not None:
        source.close()
    write(results, args.out)
    return 1 if failures or not cells else 0


def write(results: Results, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "colocation.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    (directory / "colocation.md").write_text(markdown(results))
    (directory / "colocation.svg").write_text(svg(results))
    print(f"wrote {directory}/colocation.md, .json and .svg")


if __name__ == "__main__":
    sys.exit(main())
