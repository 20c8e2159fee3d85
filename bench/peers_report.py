"""Rows, goals and the Markdown section of bench.peers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.exporter_processes import CADVISOR, DIOPTASE, KUBELET
from bench.machine import BenchMachine, markdown_table

GOALS_AT = 200
"""Number of cgroups at which the goals are evaluated."""
MAX_RSS_MIB = 64.0
PASS, MISS, OPEN = "PASS", "MISS", "OPEN"


class ExporterRow(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one exporter at one number of cgroups; medians of the rounds."""

    cgroups: int
    """Number of cgroups with a process: containers."""
    in_pods: bool
    """Whether each cgroup is below that of a pod, both with limits."""
    exporter: str
    cpu_s: float
    """CPU seconds per minute, including scrapes."""
    cpu_range_s: tuple[float, float]
    """Minimum and maximum of all rounds."""
    bpf_s: float
    """CPU seconds per minute that its BPF programs take in other tasks."""
    bpf_mib: float
    """Memory of its BPF maps."""
    rss_mib: float
    """Memory including its children, after the last round."""
    scrape_ms: float
    """Wall time of a scrape without compression."""
    gzip_ms: float
    """Wall time of a scrape in gzip."""
    scrape_kib: float
    gzip_kib: float
    series: int
    cgroup_series: int
    """Series per cgroup of the benchmark, median; 0 if the exporter does not report cgroups."""
    cgroup_buckets: int
    """Histogram buckets among these."""
    cgroup_names: int
    """Number of different metrics among these."""

    @property
    def all_cpu_s(self) -> float:
        """CPU seconds per minute, including BPF programs in other tasks."""
        return self.cpu_s + self.bpf_s

    @property
    def series_us(self) -> float:
        """Scrape time per series without compression, in microseconds."""
        return 1000 * self.scrape_ms / self.series if self.series else 0.0

    @property
    def series_gzip_us(self) -> float:
        return 1000 * self.gzip_ms / self.series if self.series else 0.0


class PeersResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    machine: BenchMachine
    settings: str
    contestants: tuple[tuple[str, str], ...]
    """Name and options of each exporter."""
    rows: tuple[ExporterRow, ...]
    absent: tuple[str, ...] = ()
    """Exporters that were not measured, and why."""


class PeersGoal(msgspec.Struct, frozen=True):
    """Result of one goal."""

    reason: str
    """PASS, MISS, or OPEN if a required measurement is missing."""
    goal: str
    text: str
    """The measured numbers."""


def evaluate_peers_goals(rows: Sequence[ExporterRow], *, in_pods: bool) -> list[PeersGoal]:
    """Evaluate each goal on the rows at GOALS_AT cgroups of that layout."""
    at = {row.exporter: row for row in rows if (row.cgroups, row.in_pods) == (GOALS_AT, in_pods)}
    own, cadvisor, kubelet = (at.get(contestant.name) for contestant in (DIOPTASE, CADVISOR, KUBELET))
    return [
        _ratio(
            "CPU, in BPF included, at most a fifth of cAdvisor's", 0.2, "CPU s/min", *_both("all_cpu_s", own, cadvisor)
        ),
        _ratio("memory at most half of cAdvisor's", 0.5, "MiB", *_both("rss_mib", own, cadvisor)),
        _memory(own),
        _ratio("scrape time a series at most half of cAdvisor's", 0.5, "us", *_both("series_us", own, cadvisor)),
        _ratio("the same in gzip", 0.5, "us", *_both("series_gzip_us", own, cadvisor)),
        _series(CADVISOR.name, own, cadvisor),
        _series(KUBELET.name, own, kubelet),
    ]


def peers_goal_lines(rows: Sequence[ExporterRow]) -> list[str]:
    """Return all goals in each layout that was measured at GOALS_AT, one line each."""
    layouts = dict.fromkeys(row.in_pods for row in rows if row.cgroups == GOALS_AT)
    return [
        f"{goal.reason} {layout(GOALS_AT, in_pods=in_pods)}: {goal.goal}: {goal.text}"
        for in_pods in layouts
        for goal in evaluate_peers_goals(rows, in_pods=in_pods)
    ]


def layout(cgroups: int, *, in_pods: bool) -> str:
    """Describe the layout of the cgroups."""
    return f"{cgroups} in pods" if in_pods else f"{cgroups} side by side"


def _both(field: str, row: ExporterRow | None, other: ExporterRow | None) -> tuple[float | None, float | None]:
    return (None if row is None else getattr(row, field)), (None if other is None else getattr(other, field))


def _ratio(goal: str, most: float, unit: str, own: float | None, other: float | None) -> PeersGoal:
    if own is None or not other:
        return PeersGoal(OPEN, goal, f"not measured at {GOALS_AT} cgroups")
    ratio = own / other
    return PeersGoal(PASS if ratio <= most else MISS, goal, f"{own:.2f} against {other:.2f} {unit}, ratio {ratio:.3f}")


def _memory(row: ExporterRow | None) -> PeersGoal:
    goal = f"memory at most {MAX_RSS_MIB:.0f} MiB"
    if row is None:
        return PeersGoal(OPEN, goal, f"not measured at {GOALS_AT} cgroups")
    share = row.rss_mib / MAX_RSS_MIB
    return PeersGoal(PASS if share <= 1 else MISS, goal, f"{row.rss_mib:.1f} MiB, ratio {share:.3f}")


def _series(name: str, row: ExporterRow | None, other: ExporterRow | None) -> PeersGoal:
    goal = f"at least as many series of a container as {name}"
    if row is None or other is None or not other.cgroup_series:
        return PeersGoal(OPEN, goal, f"not measured at {GOALS_AT} cgroups")
    met = row.cgroup_series >= other.cgroup_series
    text = f"{_of_a_cgroup(row)} against {_of_a_cgroup(other)}, ratio {row.cgroup_series / other.cgroup_series:.2f}"
    return PeersGoal(PASS if met else MISS, goal, text)


def _of_a_cgroup(row: ExporterRow) -> str:
    return f"{row.cgroup_series} ({row.cgroup_series - row.cgroup_buckets} without histogram buckets)"


COLUMNS = (
    "containers", "exporter", "CPU s/min", "range", "in BPF", "RSS MiB", "BPF maps", "scrape ms", "KiB",
    "in gzip ms", "KiB", "series",
    "us a series", "in gzip us", "series a container", "without buckets", "metrics a container",
)  # fmt: skip


def markdown(results: PeersResults) -> str:
    """Render the section of bench/RESULTS.md."""
    out = ["## Compared with cAdvisor and node_exporter", "", results.machine.line(), "", results.settings, ""]
    out += [f"- **{name}**: {what}" for name, what in results.contestants]
    out += [f"- Not measured: {why}" for why in results.absent]
    out += ["", *markdown_table(COLUMNS, map(_cells, results.rows), text_columns=2)]
    out += ["", "Goals:", "", *(f"- {line}" for line in peers_goal_lines(results.rows))]
    return "\n".join([*out, ""])


def _cells(row: ExporterRow) -> tuple[str, ...]:
    low, high = row.cpu_range_s
    return (
        layout(row.cgroups, in_pods=row.in_pods), row.exporter,
        f"{row.cpu_s:.2f}", f"{low:.2f} to {high:.2f}", f"{row.bpf_s:.2f}", f"{row.rss_mib:.1f}", f"{row.bpf_mib:.1f}",
        f"{row.scrape_ms:.1f}", f"{row.scrape_kib:,.0f}", f"{row.gzip_ms:.1f}", f"{row.gzip_kib:,.0f}", f"{row.series:,}",
        f"{row.series_us:.1f}", f"{row.series_gzip_us:.1f}",
        *(f"{n}" if row.cgroup_series else "" for n in (row.cgroup_series, row.cgroup_series - row.cgroup_buckets)),
        f"{row.cgroup_names}" if row.cgroup_series else "",
    )  # fmt: skip
