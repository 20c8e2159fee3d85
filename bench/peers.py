"""The agent beside cAdvisor and node_exporter: the same cgroups, the same minutes, the same scraper.

All of them run at once, for what one costs is asked of the kernel for each by itself; each is scraped every 10 seconds,
and the order in which they are asked is drawn anew every time. Writes JSON and a Markdown table to bench/results.

    python -m bench.peers [--counts 10,100,200,200p,500] [--rounds 3] [--only dioptase,deciding,cadvisor,kubelet,node] [--quick]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from statistics import median

import msgspec

from agent.hierarchy import detect
from api.ports import Unavailable
from bench.contestants import ALL, PARENT, Contestant, Exporter, missing
from bench.exposition import count
from bench.machine import end_cleanly_on_sigterm, this_machine
from bench.peers_report import Results, Row, layout, markdown, verdict_lines
from bench.residents import asleep, pods_file, residents
from probes import bpf

RESULTS = Path(__file__).parent / "results"
COUNTS = "10,100,200,200p,500"
SCRAPE_EVERY_S = 10.0
CYCLE_S = 1.25
"""Between two timed scrapes of the same exporter: more than a tick, or the second would find the text of the first."""
OTHERS = 1000
"""Cgroups that the machine may have beside those of the bench."""
BUSY_EVERY = 10
BUSY = "import time\nwhile True:\n    time.sleep(0.25)\n    sum(range(20000))"
"""Of every ten cgroups one computes for half a millisecond, four times a second."""
NS_PER_S = 1_000_000_000
TEXT = (
    "{rounds} rounds of {seconds:g} s after {warmup:g} s of warming up; medians. Each cgroup is in every tree and has a "
    "process that sleeps; in one of ten it computes for half a millisecond four times a second. *Side by side*: that "
    "many cgroups, without limits. *In pods*: that many containers as a kubelet makes them, each in the cgroup of a "
    "pod, with limits of CPU and memory, so there are twice as many cgroups. All exporters run at once on the same "
    "cgroups. CPU is that of an exporter and its children for each minute, with a scrape in gzip every {every:g} s; *in "
    "BPF* is what its programs take beside that, in the tasks that they run in, by the kernel's statistics, which are on "
    "for {seconds:g} s at the end; the memory of their maps is beside that of the process, too. RSS "
    "is read at the end, when each has run for {ran:.0f} s at least: cAdvisor keeps the samples of 120 s. Scrapes are "
    "timed apart from that, in each round {samples} without compression and {samples} in gzip, more than a tick apart, "
    "in an order drawn anew each time, each over a new connection. A series is a line of the exposition: each bucket of "
    "a histogram is one, so they are also counted without."
)


class Spent(msgspec.Struct):
    """What the rounds found of one exporter."""

    cpu_s: list[float] = msgspec.field(default_factory=list)
    """For each minute."""
    bpf_s: float = 0.0
    """Of its BPF programs, for each minute, in the tasks that they ran in."""
    plain_ms: list[float] = msgspec.field(default_factory=list)
    gzip_ms: list[float] = msgspec.field(default_factory=list)
    plain: bytes = b""
    gzip: bytes = b""


class Bed(msgspec.Struct, frozen=True):
    """What there is to watch."""

    cgroups: int
    in_pods: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a run goes."""

    rounds: int
    seconds: float
    """In which CPU is counted, in each round."""
    warmup_s: float
    samples: int
    """Timed scrapes in a round, of each kind."""
    order: random.Random

    @property
    def every_s(self) -> float:
        return min(SCRAPE_EVERY_S, self.seconds)

    @property
    def round_s(self) -> float:
        return self.seconds + 2 * self.samples * CYCLE_S


def program(index: int) -> Sequence[str]:
    """What lives in a cgroup."""
    return [sys.executable, "-I", "-S", "-c", BUSY] if index % BUSY_EVERY == 0 else asleep(index)


def measure(bed: Bed, contestants: Sequence[Contestant], plan: Plan) -> list[Row]:
    """All of them on one bed. Raises Unavailable where one does not come up or goes away."""
    _say(bed, "making the cgroups")
    with residents(PARENT, bed.cgroups, program, in_pods=bed.in_pods) as paths, ExitStack() as running:
        exporters = [running.enter_context(_started(contestant, paths, running)) for contestant in contestants]
        for exporter in exporters:
            exporter.wait_until_it_answers()
        _say(bed, f"{len(exporters)} exporters run; warming up for {plan.warmup_s:g} s")
        time.sleep(plan.warmup_s)
        spent = {exporter.contestant.name: Spent() for exporter in exporters}
        for number in range(1, plan.rounds + 1):
            try:
                _count_cpu(exporters, plan, spent)
                _time_scrapes(exporters, plan, spent)
            except (HTTPException, FileNotFoundError) as error:
                raise Unavailable(f"an exporter went away: {error}", "run it by itself and see") from error
            said = (f"{name} {found.cpu_s[-1]:.2f} s/min" for name, found in spent.items())
            _say(bed, f"round {number} of {plan.rounds}: {', '.join(said)}")
        _count_bpf(exporters, plan, spent)
        return [_row(bed, paths, exporter, spent[exporter.contestant.name]) for exporter in exporters]


def _say(bed: Bed, what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {layout(bed.cgroups, in_pods=bed.in_pods)}: {what}", flush=True)


def _started(contestant: Contestant, paths: Sequence[str], running: ExitStack) -> Exporter:
    directory = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="dioptase-bench-")))
    (directory / "config.yaml").write_text(f"exporters: {{maxCgroups: {2 * len(paths) + OTHERS}}}\n")
    (directory / "pods.yaml").write_text(pods_file(paths))
    return Exporter(contestant, directory)


def _count_cpu(exporters: Sequence[Exporter], plan: Plan, spent: dict[str, Spent]) -> None:
    """Each is scraped in turn, evenly spread over the time between two scrapes of the same one."""
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


def _count_bpf(exporters: Sequence[Exporter], plan: Plan, spent: dict[str, Spent]) -> None:
    """By itself and last: the kernel's statistics make every BPF program slower."""
    statistics = bpf.enable_stats()
    try:
        began, before = time.monotonic(), [exporter.bpf_run_ns() for exporter in exporters]
        time.sleep(plan.seconds)
        minutes = (time.monotonic() - began) / 60
        for exporter, run_ns in zip(exporters, before, strict=True):
            spent[exporter.contestant.name].bpf_s = (exporter.bpf_run_ns() - run_ns) / NS_PER_S / minutes
    finally:
        os.close(statistics)


def _time_scrapes(exporters: Sequence[Exporter], plan: Plan, spent: dict[str, Spent]) -> None:
    kinds = [False, True] * plan.samples
    plan.order.shuffle(kinds)
    for gzip in kinds:
        due = time.monotonic() + CYCLE_S
        for exporter in plan.order.sample(list(exporters), len(exporters)):
            scrape, found = exporter.scrape(gzip=gzip), spent[exporter.contestant.name]
            if gzip:
                found.gzip_ms.append(scrape.ms)
                found.gzip = scrape.body
            else:
                found.plain_ms.append(scrape.ms)
                found.plain = scrape.body
        time.sleep(max(0.0, due - time.monotonic()))


def _row(bed: Bed, paths: Sequence[str], exporter: Exporter, spent: Spent) -> Row:
    rss_mib = exporter.rss_mib()
    found = count(spent.plain.decode(errors="replace"))
    series, buckets, names = (
        round(median(counts.get(path, 0) for path in paths)) for counts in (found.cgroups, found.buckets, found.names)
    )
    return Row(
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
        series=found.series,
        cgroup_series=series,
        cgroup_buckets=buckets,
        cgroup_names=names,
    )


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--counts", type=_beds, default=COUNTS, help="how many cgroups; with a p, containers in pods")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="in which CPU is counted, in each round")
    parser.add_argument("--warmup", type=float, default=45.0, help="seconds before the first round")
    parser.add_argument("--samples", type=int, default=5, help="timed scrapes in a round, of each kind")
    parser.add_argument("--only", type=_names, default=tuple(ALL), help=f"of {','.join(ALL)}")
    parser.add_argument("--quick", action="store_true", help="10 containers in pods, one round of 3 s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for peers.json and .md")
    args = parser.parse_args(argv)
    if args.quick:
        args.counts, args.rounds, args.seconds, args.warmup, args.samples = _beds("10p"), 1, 3.0, 1.0, 1
    return args


def _beds(text: str) -> tuple[Bed, ...]:
    return tuple(Bed(int(word.removesuffix("p")), word.endswith("p")) for word in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in ALL]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(ALL)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    args = options(argv)
    end_cleanly_on_sigterm()
    plan = Plan(
        rounds=args.rounds, seconds=args.seconds, warmup_s=args.warmup, samples=args.samples, order=random.Random(args.seed)
    )  # fmt: skip
    try:
        machine = this_machine(detect().mode)
        problems = {ALL[name]: missing(ALL[name]) for name in args.only}
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
    write(Results(machine=machine, settings=settings, contestants=ways, rows=tuple(rows), absent=absent), args.out)
    return 0


def write(results: Results, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "peers.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    (directory / "peers.md").write_text(markdown(results))
    for line in verdict_lines(results.rows):
        print(line)
    print(f"wrote {directory}/peers.md and .json")


if __name__ == "__main__":
    sys.exit(main())
