"""Compares the agent with cAdvisor and node_exporter on the same cgroups, minutes and scraper."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from statistics import median

import msgspec

from agent.sensors.cgroup.hierarchy import detect_hierarchy
from api.interfaces import Unavailable
from api.units import NS_PER_S
from bench.cgroup_tree import cgroup_mounts, make_cgroup, remove_tree
from bench.exporter_processes import EXPORTERS, PARENT, ExporterProcess, ExporterVariant, count_series, missing_reason
from bench.machine import bench_parser, end_cleanly_on_sigterm, name_list, this_machine, write_results
from bench.peers_report import ExporterRow, PeersResults, layout, markdown, peers_goal_lines
from demo.launch import launch_in_cgroups
from probes import bpf

LIMITS = {
    "cpu.cfs_quota_us": "100000",
    "cpu.max": "100000 100000",
    "memory.limit_in_bytes": "1073741824",
    "memory.max": "1073741824",
}
"""One CPU and 1 GiB, for the files of both cgroup versions."""


def sleep_command(_index: int) -> list[str]:
    """Default program of a cgroup."""
    return ["sleep", "infinity"]


@contextmanager
def populated_cgroups(
    parent: str, count: int, program: Callable[[int], Sequence[str]] = sleep_command, *, in_pods: bool = False
) -> Iterator[list[str]]:
    """Create `count` cgroups below `parent`, each with its program; yields their paths and removes everything at the end.

    `in_pods`: each cgroup gets a parent of its own, so there are twice as many.
    """
    mounts = cgroup_mounts()
    names = [f"{parent}/pod{index:03}/container" if in_pods else f"{parent}/{index:03}" for index in range(count)]
    groups = [parent, *(group for name in names for group in _ancestors(name))]
    processes: list[subprocess.Popen[bytes]] = []
    remove_tree([mount / parent for mount in mounts])
    try:
        for group in groups:
            for mount in mounts:
                make_cgroup(mount / group, LIMITS if in_pods and group != parent else {}, leaf=group in names)
        for index, name in enumerate(names):
            processes.append(
                launch_in_cgroups(program(index), procs=[mount / name / "cgroup.procs" for mount in mounts])
            )
        yield [f"/{name}" for name in names]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        remove_tree([mount / parent for mount in mounts])


def _ancestors(name: str) -> list[str]:
    """Return the cgroups on the path below the topmost one, and the cgroup itself last."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(2, len(parts) + 1)]


def pods_file(paths: Sequence[str]) -> str:
    """Render a pods file with all cgroups, alternately shared_cores and reclaimed_cores."""
    levels = ("shared_cores", "reclaimed_cores")
    pods = [
        {
            "name": f"p{index:03}",
            "annotations": {"katalyst.kubewharf.io/qos_level": levels[index % 2]},
            "containers": [{"name": "c", "cgroup": path}],
        }
        for index, path in enumerate(paths)
    ]
    return msgspec.yaml.encode({"pods": pods}).decode()


COUNTS = "10,100,200,200p,500"
SCRAPE_EVERY_S = 10.0
CYCLE_S = 1.25
"""Time between two timed scrapes of one exporter: longer than a cycle, or the second scrape would get a cached text."""
OTHERS = 1000
"""Number of cgroups that the machine may have besides those of the benchmark."""
BUSY_EVERY = 10
BUSY = "import time\nwhile True:\n    time.sleep(0.25)\n    sum(range(20000))"
"""One of ten cgroups computes for half a millisecond, four times a second."""
TEXT = (
    "{rounds} rounds of {seconds:g} s after {warmup:g} s of warming up; medians. Each cgroup is in every tree and has a "
    "process that sleeps; in one of ten it computes for half a millisecond four times a second. *Side by side*: that "
    "many cgroups, without limits. *In pods*: that many containers as a kubelet makes them, each in the cgroup of a "
    "pod, with limits of CPU and memory, so there are twice as many cgroups. All exporters run at once on the same "
    "cgroups. CPU is that of an exporter and its children for each minute, with a scrape in gzip every {every:g} s; *in "
    "BPF* is what its programs take in addition, in the tasks that they run in, by the kernel's statistics, which are on "
    "for {seconds:g} s at the end; the memory of their maps is in addition to that of the process, too. RSS "
    "is read at the end, when each has run for {ran:.0f} s at least: cAdvisor keeps the samples of 120 s. Scrapes are "
    "timed apart from that, in each round {samples} without compression and {samples} in gzip, more than a tick apart, "
    "in an order drawn again each time, each over a new connection. A series is a line of the exposition: each bucket of "
    "a histogram is one, so they are also counted without."
)


class ExporterCosts(msgspec.Struct):
    """Measurements of one exporter in all rounds."""

    cpu_s: list[float] = msgspec.field(default_factory=list)
    """CPU seconds per minute."""
    bpf_s: float = 0.0
    """CPU seconds per minute of its BPF programs, in the tasks in which they ran."""
    plain_ms: list[float] = msgspec.field(default_factory=list)
    gzip_ms: list[float] = msgspec.field(default_factory=list)
    plain: bytes = b""
    gzip: bytes = b""


class WatchedCgroups(msgspec.Struct, frozen=True):
    """The cgroups to watch."""

    cgroups: int
    in_pods: bool


class PeersPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a run."""

    rounds: int
    seconds: float
    """Duration of the CPU measurement in each round."""
    warmup_s: float
    samples: int
    """Number of timed scrapes of each kind in a round."""
    order: random.Random

    @property
    def every_s(self) -> float:
        return min(SCRAPE_EVERY_S, self.seconds)

    @property
    def round_s(self) -> float:
        return self.seconds + 2 * self.samples * CYCLE_S


def cgroup_program(index: int) -> Sequence[str]:
    """Return the program of a cgroup by its number."""
    return [sys.executable, "-I", "-S", "-c", BUSY] if index % BUSY_EVERY == 0 else sleep_command(index)


def measure(bed: WatchedCgroups, contestants: Sequence[ExporterVariant], plan: PeersPlan) -> list[ExporterRow]:
    """Measure all exporters on one set of cgroups. Raises Unavailable if one does not start or exits."""
    _say(bed, "creating the cgroups")
    with populated_cgroups(PARENT, bed.cgroups, cgroup_program, in_pods=bed.in_pods) as paths, ExitStack() as running:
        exporters = [running.enter_context(_start_exporter(contestant, paths, running)) for contestant in contestants]
        for exporter in exporters:
            exporter.wait_until_responding()
        _say(bed, f"{len(exporters)} exporters run; warming up for {plan.warmup_s:g} s")
        time.sleep(plan.warmup_s)
        spent = {exporter.contestant.name: ExporterCosts() for exporter in exporters}
        for number in range(1, plan.rounds + 1):
            try:
                _count_cpu(exporters, plan, spent)
                _time_scrapes(exporters, plan, spent)
            except (HTTPException, FileNotFoundError) as error:
                raise Unavailable(f"an exporter exited: {error}", "run it alone and check its output") from error
            lines = (f"{name} {costs.cpu_s[-1]:.2f} s/min" for name, costs in spent.items())
            _say(bed, f"round {number} of {plan.rounds}: {', '.join(lines)}")
        _count_bpf(exporters, plan, spent)
        return [_row(bed, paths, exporter, spent[exporter.contestant.name]) for exporter in exporters]


def _say(bed: WatchedCgroups, what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {layout(bed.cgroups, in_pods=bed.in_pods)}: {what}", flush=True)


def _start_exporter(contestant: ExporterVariant, paths: Sequence[str], running: ExitStack) -> ExporterProcess:
    directory = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="dioptase-bench-")))
    (directory / "config.yaml").write_text(f"exporters: {{maxCgroups: {2 * len(paths) + OTHERS}}}\n")
    (directory / "pods.yaml").write_text(pods_file(paths))
    return ExporterProcess(contestant, directory)


def _count_cpu(exporters: Sequence[ExporterProcess], plan: PeersPlan, spent: dict[str, ExporterCosts]) -> None:
    """Measure CPU while each exporter is scraped in turn, evenly spread over the scrape interval."""
    began, before = time.monotonic(), [exporter.cpu_ns() for exporter in exporters]
    turns = round(plan.seconds / plan.every_s)
    for turn in range(turns):
        for place, exporter in enumerate(plan.order.sample(list(exporters), len(exporters))):
            due = began + (turn + (place + 0.5) / len(exporters)) * plan.every_s
            time.sleep(max(0.0, due - time.monotonic()))
            exporter.scrape(gzip=True)
    time.sleep(max(0.0, began + plan.seconds - time.monotonic()))
    minutes = (time.monotonic() - began) / 60
    for exporter, cpu_ns in zip(exporters, before, strict=True):
        spent[exporter.contestant.name].cpu_s.append((exporter.cpu_ns() - cpu_ns) / NS_PER_S / minutes)


def _count_bpf(exporters: Sequence[ExporterProcess], plan: PeersPlan, spent: dict[str, ExporterCosts]) -> None:
    """Measure last and separately, because the kernel's statistics slow down every BPF program."""
    statistics = bpf.enable_stats()
    try:
        began, before = time.monotonic(), [exporter.bpf_run_ns() for exporter in exporters]
        time.sleep(plan.seconds)
        minutes = (time.monotonic() - began) / 60
        for exporter, run_ns in zip(exporters, before, strict=True):
            spent[exporter.contestant.name].bpf_s = (exporter.bpf_run_ns() - run_ns) / NS_PER_S / minutes
    finally:
        os.close(statistics)


def _time_scrapes(exporters: Sequence[ExporterProcess], plan: PeersPlan, spent: dict[str, ExporterCosts]) -> None:
    kinds = [False, True] * plan.samples
    plan.order.shuffle(kinds)
    for gzip in kinds:
        due = time.monotonic() + CYCLE_S
        for exporter in plan.order.sample(list(exporters), len(exporters)):
            scrape, costs = exporter.scrape(gzip=gzip), spent[exporter.contestant.name]
            if gzip:
                costs.gzip_ms.append(scrape.ms)
                costs.gzip = scrape.body
            else:
                costs.plain_ms.append(scrape.ms)
                costs.plain = scrape.body
        time.sleep(max(0.0, due - time.monotonic()))


def _row(bed: WatchedCgroups, paths: Sequence[str], exporter: ExporterProcess, spent: ExporterCosts) -> ExporterRow:
    rss_mib = exporter.rss_mib()
    numbers = count_series(spent.plain.decode(errors="replace"))
    series, buckets, names = (
        round(median(numbers.get(path, 0) for path in paths))
        for numbers in (numbers.cgroups, numbers.buckets, numbers.names)
    )
    return ExporterRow(
        cgroups=bed.cgroups,
        in_pods=bed.in_pods,
        exporter=exporter.contestant.name,
        cpu_s=median(spent.cpu_s),
        cpu_range_s=(min(spent.cpu_s), max(spent.cpu_s)),
        bpf_s=spent.bpf_s,
        bpf_mib=exporter.bpf_memory_mib(),
        rss_mib=rss_mib,
        scrape_ms=median(spent.plain_ms),
        gzip_ms=median(spent.gzip_ms),
        scrape_kib=len(spent.plain) / 1024,
        gzip_kib=len(spent.gzip) / 1024,
        series=numbers.series,
        cgroup_series=series,
        cgroup_buckets=buckets,
        cgroup_names=names,
    )


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser("peers", __doc__)
    parser.add_argument(
        "--counts", type=_parse_watched_cgroups, default=COUNTS, help="how many cgroups; with a p, containers in pods"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="in which CPU is counted, in each round")
    parser.add_argument("--warmup", type=float, default=45.0, help="seconds before the first round")
    parser.add_argument("--samples", type=int, default=5, help="timed scrapes in a round, of each kind")
    parser.add_argument("--only", type=name_list(EXPORTERS), default=tuple(EXPORTERS), help=f"of {','.join(EXPORTERS)}")
    parser.add_argument("--quick", action="store_true", help="10 containers in pods, one round of 3 s")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    if args.quick:
        args.counts, args.rounds, args.seconds, args.warmup, args.samples = (
            _parse_watched_cgroups("10p"),
            1,
            3.0,
            1.0,
            1,
        )
    return args


def _parse_watched_cgroups(text: str) -> tuple[WatchedCgroups, ...]:
    return tuple(WatchedCgroups(int(word.removesuffix("p")), word.endswith("p")) for word in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    args = options(argv)
    end_cleanly_on_sigterm()
    plan = PeersPlan(
        rounds=args.rounds, seconds=args.seconds, warmup_s=args.warmup, samples=args.samples, order=random.Random(args.seed)
    )  # fmt: skip
    try:
        machine = this_machine(detect_hierarchy().mode)
        problems = {EXPORTERS[name]: missing_reason(EXPORTERS[name]) for name in args.only}
        contestants = [contestant for contestant, problem in problems.items() if problem is None]
        absent = tuple(f"{c.name}: {why.reason}; {why.remedy}" for c, why in problems.items() if why)
        for line in absent:
            print(f"bench: without {line}", file=sys.stderr)
        rows = [row for bed in args.counts for row in measure(bed, contestants, plan)]
    except (Unavailable, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    ran = plan.warmup_s + plan.rounds * plan.round_s
    settings = TEXT.format(
        seconds=plan.seconds, rounds=plan.rounds, warmup=plan.warmup_s, every=plan.every_s, ran=ran, samples=plan.samples
    )  # fmt: skip
    ways = tuple((contestant.name, contestant.what) for contestant in contestants)
    write(PeersResults(machine=machine, settings=settings, contestants=ways, rows=tuple(rows), absent=absent), args.out)
    return 0


def write(results: PeersResults, directory: Path) -> None:
    write_results(directory, "peers", markdown(results), results)
    for line in peers_goal_lines(results.rows):
        print(line)
    print(f"wrote {directory}/peers.md and .json")


if __name__ == "__main__":
    sys.exit(main())
