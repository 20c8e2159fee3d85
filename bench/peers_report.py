"""Rows, goals and the Markdown section of bench.peers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.exporter_processes import CADVISOR, DIOPTASE, KUBELET
from bench.machine import BenchMachine

GOALS_AT = 200
"""Cgroups at which the goals are set."""
MAX_RSS_MIB = 64.0
PASS, MISS, OPEN = "PASS", "MISS", "OPEN"


class ExporterRow(msgspec.Struct, frozen=True, kw_only=True):
    """One exporter at one number of cgroups; medians of the rounds."""

    cgroups: int
    """Those with a process in them: containers."""
    in_pods: bool
    """Each below the cgroup of a pod, both with limits; else side by side."""
    exporter: str
    cpu_s: float
    """CPU seconds for each minute, scrapes included."""
    cpu_range_s: tuple[float, float]
    """Of all rounds."""
    bpf_s: float
    """CPU seconds for each minute that its BPF programs take in other tasks."""
    bpf_mib: float
    """Of their maps."""
    rss_mib: float
    """With its children, after the last round."""
    scrape_ms: float
    """Wall time of a scrape without compression."""
    gzip_ms: float
    """Wall time of a scrape in gzip."""
    scrape_kib: float
    gzip_kib: float
    series: int
    cgroup_series: int
    """Of each cgroup of the bench, median; 0 where an exporter knows no cgroups."""
    cgroup_buckets: int
    """Of those, buckets of histograms."""
    cgroup_names: int
    """How many different metrics those are."""

    @property
    def all_cpu_s(self) -> float:
        """CPU seconds for each minute, wherever they are spent."""
        return self.cpu_s + self.bpf_s

    @property
    def series_us(self) -> float:
        """Scrape time of one series, without compression."""
        return 1000 * self.scrape_ms / self.series if self.series else 0.0

    @property
    def series_gzip_us(self) -> float:
        return 1000 * self.gzip_ms / self.series if self.series else 0.0


class PeersResults(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    machine: BenchMachine
    settings: str
    contestants: tuple[tuple[str, str], ...]
    """Name and how it was run."""
    rows: tuple[ExporterRow, ...]
    absent: tuple[str, ...] = ()
    """What was not measured, and why."""


class PeersGoal(msgspec.Struct, frozen=True):
    """Whether one goal is met."""

    reason: str
    """PASS, MISS, or OPEN where what it takes was not measured."""
    goal: str
    text: str
    """The numbers."""


def evaluate_peers_goals(rows: Sequence[ExporterRow], *, in_pods: bool) -> list[PeersGoal]:
    """Each goal, on the rows at GOALS_AT cgroups of that layout."""
    at = {row.exporter: row for row in rows if (row.cgroups, row.in_pods) == (GOALS_AT, in_pods)}
    ours, cadvisor, kubelet = (at.get(contestant.name) for contestant in (DIOPTASE, CADVISOR, KUBELET))
    return [
        _ratio(
            "CPU, in BPF included, at most a fifth of cAdvisor's", 0.2, "CPU s/min", *_both("all_cpu_s", ours, cadvisor)
        ),
        _ratio("memory at most half of cAdvisor's", 0.5, "MiB", *_both("rss_mib", ours, cadvisor)),
        _memory(ours),
        _ratio("scrape time a series at most half of cAdvisor's", 0.5, "us", *_both("series_us", ours, cadvisor)),
        _ratio("the same in gzip", 0.5, "us", *_both("series_gzip_us", ours, cadvisor)),
        _series(CADVISOR.name, ours, cadvisor),
        _series(KUBELET.name, ours, kubelet),
    ]


def peers_goal_lines(rows: Sequence[ExporterRow]) -> list[str]:
    """All goals in each layout that was measured at GOALS_AT, as they are printed and shown."""
    layouts = dict.fromkeys(row.in_pods for row in rows if row.cgroups == GOALS_AT)
    return [
        f"{found.reason} {layout(GOALS_AT, in_pods=in_pods)}: {found.goal}: {found.text}"
        for in_pods in layouts
        for found in evaluate_peers_goals(rows, in_pods=in_pods)
    ]


def layout(cgroups: int, *, in_pods: bool) -> str:
    """For a person."""
    return f"{cgroups} in pods" if in_pods else f"{cgroups} side by side"


def _both(field: str, ours: ExporterRow | None, theirs: ExporterRow | None) -> tuple[float | None, float | None]:
    return (None if ours is None else getattr(ours, field)), (None if theirs is None else getattr(theirs, field))


def _ratio(goal: str, most: float, unit: str, ours: float | None, theirs: float | None) -> PeersGoal:
    if ours is None or not theirs:
        return PeersGoal(OPEN, goal, f"not measured at {GOALS_AT} cgroups")
    ratio = ours / theirs
    return PeersGoal(
        PASS if ratio <= most else MISS, goal, f"{ours:.2f} against {theirs:.2f} {unit}, ratio {ratio:.3f}"
    )


def _memory(ours: ExporterRow | None) -> PeersGoal:
    goal = f"memory at most {MAX_RSS_MIB:.0f} MiB"
    if ours is None:
        return PeersGoal(OPEN, goal, f"not measured at {GOALS_AT} cgroups")
    share = ours.rss_mib / MAX_RSS_MIB
    return PeersGoal(PASS if share <= 1 else MISS, goal, f"{ours.rss_mib:.1f} MiB, ratio {share:.3f}")


def _series(name: str, ours: ExporterRow | None, theirs: ExporterRow | None) -> PeersGoal:
    goal = f"at least as many series of a container as {name}"
    if ours is None or theirs is None or not theirs.cgroup_series:
        return PeersGoal(OPEN, goal, f"not measured at {GOALS_AT} cgroups")
    met = ours.cgroup_series >= theirs.cgroup_series
    text = f"{_of_a_cgroup(ours)} against {_of_a_cgroup(theirs)}, ratio {ours.cgroup_series / theirs.cgroup_series:.2f}"
    return PeersGoal(PASS if met else MISS, goal, text)


def _of_a_cgroup(row: ExporterRow) -> str:
    return f"{row.cgroup_series} ({row.cgroup_series - row.cgroup_buckets} without histogram buckets)"


COLUMNS = (
    "containers", "exporter", "CPU s/min", "range", "in BPF", "RSS MiB", "BPF maps", "scrape ms", "KiB",
    "in gzip ms", "KiB", "series",
    "us a series", "in gzip us", "series a container", "without buckets", "metrics a container",
)  # fmt: skip


def markdown(results: PeersResults) -> str:
    """The section of bench/RESULTS.md."""
    out = ["## Beside cAdvisor and node_exporter", "", results.machine.line(), "", results.settings, ""]
    out += [f"- **{name}**: {what}" for name, what in results.contestants]
    out += [f"- Not measured: {why}" for why in results.absent]
    out += ["", f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    out += [_line(row) for row in results.rows]
    out += ["", "Goals:", "", *(f"- {line}" for line in peers_goal_lines(results.rows))]
    return "\n".join([*out, ""])


def _line(row: ExporterRow) -> str:
    low, high = row.cpu_range_s
    cells = (
        layout(row.cgroups, in_pods=row.in_pods), row.exporter,
        f"{row.cpu_s:.2f}", f"{low:.2f} to {high:.2f}", f"{row.bpf_s:.2f}", f"{row.rss_mib:.1f}", f"{row.bpf_mib:.1f}",
        f"{row.scrape_ms:.1f}", f"{row.scrape_kib:,.0f}", f"{row.gzip_ms:.1f}", f"{row.gzip_kib:,.0f}", f"{row.series:,}",
        f"{row.series_us:.1f}", f"{row.series_gzip_us:.1f}",
        *(f"{n}" if row.cgroup_series else "" for n in (row.cgroup_series, row.cgroup_series - row.cgroup_buckets)),
        f"{row.cgroup_names}" if row.cgroup_series else "",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"
