"""The main benchmark: an open-loop online service with batch work, in every scenario and colocation mode, on the cgroups that a
kubelet makes, or with `--layout flat` in two cgroups side by side. Cells are shuffled within each repetition, so that a slow
minute of the machine affects no mode more than another.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from agent.sensors.cgroup.hierarchy import Hierarchy, detect_hierarchy
from api.interfaces import RunqLatencySource, Unavailable
from api.snapshot import RunqLatency
from bench import colocation_report, kubelet_report
from bench.colocation_cell import (
    AGENT_WARMUP_S,
    MAX_QUIET_OTHERS,
    MAX_QUIET_STOLEN,
    WARMUP_S,
    CellResult,
    CellSetup,
    measure_cell,
    warmup_s,
)
from bench.colocation_figures import save_figures
from bench.colocation_layouts import FLAT, KUBELET, kubelet_root
from bench.colocation_modes import (
    COMPARED_MODES,
    CURVE_MODES,
    KUBELET_COMPARED_MODES,
    KUBELET_MODES,
    MAIN_MODES,
    MODES_BY_NAME,
)
from bench.colocation_report import ColocationResults, Reaction
from bench.colocation_scenarios import CURVE_SCENARIO, DEFAULT_SCENARIOS, SCENARIOS_BY_LAYOUT
from bench.colocation_scenarios import SCENARIOS_BY_NAME as SCENARIOS
from bench.machine import bench_parser, end_cleanly_on_sigterm, name_list, node_times, this_machine, write_results
from bench.reaction import KINDS, PERIOD_S, measure_reaction
from demo.online import pieces_for
from demo.workloads import allowed_cpu_count, size_for

MAX_TRIES = 3
"""Number of measurements of a cell that other work disturbs."""
QUIET_TIMEOUT_S = 20.0
CELL_OVERHEAD_S, AGENT_START_S = 3.0, 6.0
"""Approximate time of a cell besides its warm-up and measured time, and of an agent's start."""

CellPlan = list[tuple[int, str, str]]
"""Repetition, mode, scenario."""


class LayoutDefaults(msgspec.Struct, frozen=True):
    """What a full run on one layout measures."""

    modes: tuple[str, ...]
    compared: tuple[str, ...]
    """Modes of the first round only."""
    curve: tuple[str, ...]
    """Modes of the trade-off."""
    seconds: float
    steps: int
    minutes: float


LAYOUTS = {
    KUBELET: LayoutDefaults(KUBELET_MODES, KUBELET_COMPARED_MODES, (), seconds=6.0, steps=0, minutes=72.0),
    FLAT: LayoutDefaults(MAIN_MODES, COMPARED_MODES, CURVE_MODES, seconds=8.0, steps=30, minutes=25.0),
}
REACTION_SCENARIOS = {KUBELET: "burstable-besteffort-cpu-10", FLAT: "steady-10"}


def options(argv: Sequence[str]) -> argparse.Namespace:
    parser = bench_parser("colocation", __doc__)
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default=KUBELET, help="where the cgroups are")
    parser.add_argument("--modes", type=name_list(MODES_BY_NAME), help="these alone, in every round of every scenario")
    parser.add_argument(
        "--scenarios", help="names or patterns with *, separated by commas; default: those of the report"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--curve-rounds", type=int, default=2, help="rounds of the trade-off, flat only; 0 leaves it out"
    )
    parser.add_argument("--seconds", type=float, help="measured time of a cell, after its warm-up: 6, flat 8")
    parser.add_argument("--steps", type=int, help="jumps of the load in each reaction test: 0 (none), flat 30")
    parser.add_argument(
        "--reactions", type=name_list(MODES_BY_NAME), default=("ours",), help="modes of the reaction tests"
    )
    parser.add_argument(
        "--minutes", type=float, help="repetitions that do not fit into this are left out and listed: 72, flat 25"
    )
    parser.add_argument("--waits", action="store_true", help="also read the online cgroup's run-queue wait")
    parser.add_argument(
        "--quick", action="store_true", help="one round of 2 s cells, two steps, no curve, however busy the machine is"
    )
    parser.add_argument(
        "--again", type=_former_results, metavar="FILE",
        help="measure only the cells of these results, such as bench/results/colocation.json, that other work disturbed, and "
        "keep the quieter result of each",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    defaults = LAYOUTS[args.layout]
    for name in ("seconds", "steps", "minutes"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(defaults, name))
    try:
        args.scenarios = matching_scenarios(args.layout, args.scenarios)
    except ValueError as error:
        parser.error(str(error))
    if args.quick:
        args.rounds, args.seconds, args.curve_rounds, args.steps = 1, 2.0, 0, min(args.steps, 2)
    return args


def _former_results(file: str) -> ColocationResults:
    try:
        return msgspec.json.decode(Path(file).read_bytes(), type=ColocationResults)
    except (OSError, msgspec.MsgspecError) as error:
        raise argparse.ArgumentTypeError(f"{file} has no results of this benchmark: {error}") from error


def matching_scenarios(layout: str, patterns: str | None) -> tuple[str, ...]:
    """Return the scenarios of a layout that match a comma-separated list of patterns. Raises ValueError for one without any."""
    if patterns is None:
        return DEFAULT_SCENARIOS[layout]
    names: list[str] = []
    for pattern in patterns.split(","):
        matches = fnmatch.filter(SCENARIOS_BY_LAYOUT[layout], pattern)
        if not matches:
            listed = ", ".join(SCENARIOS_BY_LAYOUT[layout])
            raise ValueError(f"--scenarios: {pattern!r} matches none of layout {layout}: {listed}")
        names += matches
    return tuple(dict.fromkeys(names))


def plan_of(args: argparse.Namespace) -> CellPlan:
    """Return all cells in order of measurement, repetition by repetition, so that a time limit cuts off repetitions."""
    order, layout = random.Random(args.seed), LAYOUTS[args.layout]
    if args.again is not None:
        plan = [(cell.round, cell.mode, cell.scenario) for cell in args.again.cells if cell.noise.level() >= 1]
        order.shuffle(plan)
        return plan
    curve_modes = (args.modes or layout.curve) if layout.curve else ()
    plan = []
    for number in range(1, max(args.rounds, args.curve_rounds if curve_modes else 0) + 1):
        modes = args.modes or (layout.modes + layout.compared if number == 1 else layout.modes)
        cells = [(number, mode, name) for name in args.scenarios for mode in modes if number <= args.rounds]
        cells += [(number, mode, CURVE_SCENARIO) for mode in curve_modes if number <= args.curve_rounds]
        cells = list(dict.fromkeys(cells))
        order.shuffle(cells)
        plan += cells
    return plan


def expected_s(mode: str, seconds: float) -> float:
    """Approximate duration of a cell."""
    starts_s = 0.0 if MODES_BY_NAME[mode].agent_config is None else AGENT_START_S
    return warmup_s(MODES_BY_NAME[mode]) + seconds + CELL_OVERHEAD_S + starts_s


class TimeBudget:
    """The time left for measurements that were not planned."""

    def __init__(self, minutes: float, planned_s: float) -> None:
        self._ends = time.monotonic() + 60 * minutes
        self.planned_s = planned_s
        """Time that the rest of the plan needs."""

    def fits(self, seconds: float) -> bool:
        """Whether this much time is left."""
        return self._ends - time.monotonic() >= seconds

    def has_time_for_retry(self, seconds: float) -> bool:
        """Whether this much time can be spent in addition to the rest of the plan."""
        return self.fits(seconds + self.planned_s)


def run_cells(
    args: argparse.Namespace, bed: CellSetup, plan: CellPlan, budget: TimeBudget
) -> tuple[list[CellResult], list[str], list[str]]:
    """Measure all cells; returns them, the failures, and the repetitions left out for lack of time."""
    cells: list[CellResult] = []
    failures: list[str] = []
    left_out: list[str] = []
    for done, (number, mode, scenario) in enumerate(plan, 1):
        began, where = time.monotonic(), f"[{done}/{len(plan)}]"
        budget.planned_s -= expected_s(mode, args.seconds)
        if (number > 1 or args.again is not None) and not budget.fits(expected_s(mode, args.seconds)):
            left_out.append(f"{mode} in {scenario}, round {number}")
            print(f"{where} {left_out[-1]}: no time left", flush=True)
            continue
        try:
            cell = _quiet_cell(bed, (number, mode, scenario), 1 if args.quick else MAX_TRIES, budget)
        except (OSError, RuntimeError, Unavailable) as error:
            failures.append(f"{mode} in {scenario}, round {number}: {error}")
            print(f"{where} {failures[-1]}", flush=True)
            continue
        cells.append(cell)
        print(f"{where} {_cell_line(cell)} ({time.monotonic() - began:.0f} s)", flush=True)
    return cells, failures, left_out


def _quiet_cell(bed: CellSetup, which: tuple[int, str, str], tries: int, budget: TimeBudget) -> CellResult:
    """Measure a cell, again while other work disturbs it and time is left; returns the least disturbed result."""
    tried: list[CellResult] = []
    number, mode, scenario = which
    while not tried or (len(tried) < tries and budget.has_time_for_retry(expected_s(mode, bed.seconds))):
        if tries > 1 and (waited_s := wait_until_quiet()) > 1:
            print(f"  waited {waited_s:.0f} s until the node was idle", flush=True)
        tried.append(measure_cell(bed, MODES_BY_NAME[mode], SCENARIOS[scenario], number))
        if tried[-1].noise.level() < 1:
            break
        print(f"  disturbed: {_cell_line(tried[-1])}", flush=True)
    return min(tried, key=lambda cell: cell.noise.level())


def quieter_cells(former: Sequence[CellResult], again: Sequence[CellResult]) -> list[CellResult]:
    """Return the cells of a former run, each replaced by its new measurement where other work disturbed that one less."""
    measured = {(cell.round, cell.mode, cell.scenario): cell for cell in again}
    pairs = [(cell, measured.get((cell.round, cell.mode, cell.scenario), cell)) for cell in former]
    return [min(pair, key=lambda cell: cell.noise.level()) for pair in pairs]


def wait_until_quiet() -> float:
    """Wait until the node has been nearly idle for a second, or QUIET_TIMEOUT_S; returns the seconds waited."""
    began = time.monotonic()
    while time.monotonic() - began < QUIET_TIMEOUT_S:
        before = node_times()
        time.sleep(1)
        after = node_times()
        if after.busy - before.busy <= MAX_QUIET_OTHERS * (after.total - before.total):
            break
    return time.monotonic() - began - 1


def _cell_line(cell: CellResult) -> str:
    text = (
        f"{cell.scenario:13} {cell.mode:11} p50 {cell.p50_ms:7.2f} p99 {cell.p99_ms:8.2f} p99.9 {cell.p999_ms:8.2f} ms, "
        f"{cell.units_per_s:7,.0f} units/s, node {cell.node_use:4.0%}, stolen {cell.noise.stolen:.1%}, "
        f"others {cell.noise.others:.1%}, lost {cell.lost}, service {cell.online_us:.0f} us, "
        f"client {cell.client_cores:.2f} cores"
    )
    if cell.agent_cores:
        text += f", agent {cell.agent_cores:.3f} cores"
    if cell.lending is not None:
        text += f", reclaimable {cell.lending.reclaimable_cores:.2f} cores, {cell.lending.changes} changes"
    if cell.waits is not None:
        text += f", wait mean {cell.waits.mean_ms:.2f} p99 {cell.waits.p99_ms or float('nan'):.2f} ms"
    return text


def reactions(args: argparse.Namespace, bed: CellSetup) -> list[Reaction]:
    reactions = []
    for mode, kind in [(mode, kind) for mode in args.reactions for kind in KINDS] if args.steps else ():
        print(f"{mode}: {args.steps} {kind} of the load", flush=True)
        base = SCENARIOS[REACTION_SCENARIOS[args.layout]]
        reactions.append(measure_reaction(bed, MODES_BY_NAME[mode], base, kind, args.steps))
        late = colocation_report.format_reaction_ms(colocation_report.reaction_quantile(reactions[-1], 0.99))
        print(
            f"  taken back in "
            f"{colocation_report.format_reaction_ms(colocation_report.reaction_quantile(reactions[-1], 0.5))}, at worst {late}",
            flush=True,
        )
        print(
            f"  quota decided: {_format_each(reactions[-1].decided_ms)}; written: {_format_each(reactions[-1].written_ms)}",
            flush=True,
        )
    return reactions


def _format_each(after_ms: Sequence[float]) -> str:
    return f"after {', '.join(f'{value:.0f}' for value in after_ms)} ms" if after_ms else "never"


def reactions_s(args: argparse.Namespace) -> float:
    """Approximate duration of the reaction tests."""
    return (
        len(args.reactions) * len(KINDS) * (AGENT_START_S + AGENT_WARMUP_S + PERIOD_S * args.steps)
        if args.steps
        else 0.0
    )


def settings(args: argparse.Namespace, bed: CellSetup) -> str:
    size = bed.size
    rounds = f"{args.rounds} and {args.curve_rounds} of the trade-off" if args.layout == FLAT else f"{args.rounds}"
    return (
        f"Service: {size.workers} workers, {size.service_us} us of CPU a request, or where memory matters {bed.pieces:,} "
        "copies of 1 KiB out of 4 MiB, which cost as much on the quiet machine; Poisson arrivals, open loop. Batch: "
        f"{size.burners} burners, each the SHA-256 of 64 KiB over and over, or copying through 96 MiB of memory of its own. "
        f"Shuffled rounds, {rounds}, of {args.seconds:g} s a cell after "
        f"{WARMUP_S:g} s of warm-up ({AGENT_WARMUP_S:g} s where the agent runs: it lends step by step). Latency from when a "
        f"request was due to the kernel's timestamp of its reply; a lost request counts with 5 s. The client runs under "
        f"SCHED_FIFO on the same CPUs. A cell in which other processes took {MAX_QUIET_OTHERS:.0%} of the node or more, or the "
        f"hypervisor {MAX_QUIET_STOLEN:.1%}, was measured again where there was time, at most {MAX_TRIES} times in all. "
        "Medians of the rounds; in a round every mode gets the same arrivals."
    )


def _open_waits() -> RunqLatencySource:
    from probes.runqlat import open_runqlat  # noqa: PLC0415 - only --waits needs a probe

    return open_runqlat()


def main(argv: Sequence[str] | None = None) -> int:
    args = options(sys.argv[1:] if argv is None else argv)
    end_cleanly_on_sigterm()
    try:
        with ExitStack() as stack:
            hierarchy = detect_hierarchy()
            source = _open_waits() if args.waits else None
            if source is not None:
                stack.callback(source.close)
            if args.layout == KUBELET:
                stack.enter_context(kubelet_root(hierarchy, allowed_cpu_count()))
            results = measure(args, hierarchy, source)
    except Unavailable as error:
        print(f"bench: {error.reason}\n  remedy: {error.remedy}", file=sys.stderr)
        return 2
    write(results, args.out)
    return 1 if results.failures or not results.cells else 0


def measure(args: argparse.Namespace, hierarchy: Hierarchy, source: RunqLatencySource | None) -> ColocationResults:
    """Measure the reaction times and all cells."""

    def waits(cgroup_id: int) -> RunqLatency | None:
        return source.read({cgroup_id: "/online"}).get(cgroup_id) if source else None

    cpus = tuple(sorted(os.sched_getaffinity(0)))
    size, plan = size_for(allowed_cpu_count()), plan_of(args)
    budget = TimeBudget(args.minutes, sum(expected_s(mode, args.seconds) for _, mode, _ in plan))
    if not args.quick:
        wait_until_quiet()
    pieces = pieces_for(size.service_us)
    bed = CellSetup(hierarchy=hierarchy, cpus=cpus, size=size, pieces=pieces, seconds=args.seconds, waits=waits)
    minutes = (budget.planned_s + reactions_s(args)) / 60
    print(f"{len(plan)} cells, and {args.steps} jumps of each kind: about {minutes:.0f} minutes", flush=True)
    reacted = reactions(args, bed)
    cells, failures, left_out = run_cells(args, bed, plan, budget)
    if args.again is not None:
        cells, left_out = quieter_cells(args.again.cells, cells), [*args.again.left_out]
    return ColocationResults(
        machine=this_machine(hierarchy.mode),
        settings=settings(args, bed),
        layout=args.layout,
        cells=tuple(cells),
        reactions=tuple(reacted),
        failures=tuple(failures),
        left_out=tuple(left_out),
    )


def write(results: ColocationResults, directory: Path) -> None:
    """Write the section, the results and the figures, and print the goals."""
    if results.layout == KUBELET:
        name, text, printed = "colocation", kubelet_report.markdown(results), kubelet_report.summary_table(results)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.summary.md").write_text("\n".join(printed) + "\n")
    else:
        name, text = "colocation_flat", colocation_report.markdown(results)
        printed = colocation_report.tradeoff_markdown(results)
        printed += [goal.line() for goal in colocation_report.evaluate_colocation_goals(results)]
    write_results(directory, name, text, results)
    save_figures(results, directory, name)
    print("\n".join(printed))
    print(f"wrote {directory}/{name}.md and others")


if __name__ == "__main__":
    sys.exit(main())
