"""Generates docs/metrics.md from the metric catalogue: `python -m tools.metrics_reference docs/metrics.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from api.metric_profiles import (
    LABEL_VALUES,
    MAX_AGGRESSORS_PER_CGROUP,
    PROFILE_LIMITS,
    MetricProfile,
    has_metric,
    is_late,
)
from api.metrics import AGENT_METRICS, CGROUP_LABELS, COARSE_BOUNDS_S, RUNQ_LATENCY_BOUNDS_S, Metric
from exporters.prometheus.cgroup_families import MAX_DEVICES_PER_CGROUP
from exporters.prometheus.late_series import START_S
from exporters.prometheus.node_families import MAX_INTERFACES

CGROUP_MEMORY_PREFIXES = tuple(
    f"dioptase_cgroup_{what}" for what in ("memory_", "page_", "major_", "workingset_", "reclaim", "oom_", "kswapd_")
)
CHAPTERS = (
    ("dioptase_node_", "The node"),
    (CGROUP_MEMORY_PREFIXES, "Every cgroup: memory"),
    (("dioptase_cgroup_io_", "dioptase_cgroup_block_", "dioptase_cgroup_network_"), "Every cgroup: disks and network"),
    ("dioptase_cgroup_", "Every cgroup: CPU and threads"),
    ("dioptase_indicator_", "Metrics that pods publish about themselves"),
    (
        (
            "dioptase_pool_",
            "dioptase_share_",
            "dioptase_reclaim_",
            "dioptase_region_",
            "dioptase_network_",
            "dioptase_rejected_",
        ),
        "Reclaimed resources",
    ),
    (("dioptase_reclaimable_", "dioptase_reclaimed_", "dioptase_online_"), "Totals of colocation"),
    (("dioptase_decisions_", "dioptase_rounds_"), "Decisions"),
    ("dioptase_", "The agent itself"),
)
STANDARD_AGGRESSORS = PROFILE_LIMITS[MetricProfile.STANDARD].aggressors
MAX_LISTED_BOUNDS = 12
"""Number of bucket bounds that the table of profiles lists."""
HEAD = f"""# Metrics

Generated from `api/metrics.py` by `python -m tools.metrics_reference docs/metrics.md`; edit that file instead of this one.

`/metrics` serves the Prometheus text format or OpenMetrics. With `OTEL_EXPORTER_OTLP_ENDPOINT` the same metrics are sent by
OTLP, together with `system.*`, `container.*` and `k8s.*` of the semantic conventions.

- Name in OpenTelemetry: dots, without `_total` and without the unit below the name; `dioptase_node_cpu_seconds_total` is
  `dioptase.node.cpu`.
- The word below the name of a counter or histogram says when it starts. `agent`: it starts at zero with each agent. No word:
  it starts at boot, or with the cgroup or pod.
- A value that kernel, cgroup or privileges do not provide has no sample: never 0, never -1.
- `CGROUP`: the labels {", ".join(f"`{label}`" for label in CGROUP_LABELS)}; all but the first are empty without a listed pod.
  Only a container's own cgroup has pod labels, so sums over pods count nothing twice.
- CPU, memory, pressure and I/O include descendants, values of probes do not; each row says it. Add them up with
  `cgroup=~"/web(/.*)?"`, as page and `dioptase top` do.
- Names of kinds, events, modes and vectors are the kernel's. `device`: a disk's name, or `MAJOR:MINOR`.
- In profile `full`, histograms of run-queue latency have {len(RUNQ_LATENCY_BOUNDS_S)} bounds from 1 us to 34 s, each twice the
  previous one. Without the probe they have one bucket, with sum and count of `/proc/PID/schedstat`. Histograms of throttles,
  reclaim and block I/O have {len(COARSE_BOUNDS_S)} bounds from 16 us to 17 s, each four times the previous one.
- OpenMetrics exemplars (`round`, with OpenTelemetry `trace_id` and `span_id`): decisions, cycles, and the longest wait of each
  pod in the latest cycle.
- An agent exports at most `exporters.maxCgroups` cgroups, {MAX_AGGRESSORS_PER_CGROUP} aggressors (label `culprit`) and
  {MAX_DEVICES_PER_CGROUP} devices per cgroup, and {MAX_INTERFACES} interfaces. `dioptase_exporter_dropped_total` counts
  what these limits leave out.
- `process_*` are the agent's own, from the Prometheus client library.

## Profiles

The setting `exporters.metricProfile` (`metrics.profile` of the chart) selects the metrics. In the tables below, the column
*profile* names the smallest profile that has the metric. If profile `standard` has only some values of a label, they follow
in parentheses.

| profile | series per container | cgroups on a node with pods | aggressors | run-queue latency bounds | other bounds |
|---|---|---|---|---|---|
{{profiles}}
- Dashboards and alerts need profile `standard` or `full`.
- *Series per container* holds for an ordinary container: it has a CPU quota, a memory limit, TCP connections, one disk and
  {STANDARD_AGGRESSORS} aggressors, and was neither throttled nor in reclaim. A container that was both has up to 30 more
  series.
- *late* in the column *profile*: in `small` and `standard`, a series of this metric begins only when it has counted
  something. It is then zero for {START_S} s, and has its value from then on until the cgroup is removed. So `rate()` and
  `increase()` count from zero if the scrape interval is at most {START_S} s. Exception: if the agent has exported a cgroup
  for less than {START_S} s, for instance after its start, a series of the cgroup begins with its value. Over OTLP a series
  has its value at once, with the time at which it was zero.
- Native histograms are not served. They need the protobuf exposition, which the Prometheus client library for Python does
  not have.
"""


def _profile_row(profile: MetricProfile) -> str:
    limits = PROFILE_LIMITS[profile]
    bound = "all" if limits.series_per_container is None else f"at most {limits.series_per_container}"
    cgroups = "containers, QoS classes, top-level cgroups" if limits.container_cgroups_only else "all"
    return (
        f"| `{profile.value}` | {bound} | {cgroups} | {limits.aggressors} | {_bounds(limits.latency_slots)} "
        f"| {_bounds(limits.coarse_slots)} |\n"
    )


def _bounds(slots: tuple[int, ...]) -> str:
    if len(slots) > MAX_LISTED_BOUNDS:
        return f"all {len(slots)}"
    return ", ".join(f"{RUNQ_LATENCY_BOUNDS_S[slot] * 1000:.3g}" for slot in slots) + " ms" if slots else "no series"


def _profile_cell(metric: Metric) -> str:
    smallest = next(profile for profile in MetricProfile if has_metric(profile, metric))
    late = ", late" if is_late(MetricProfile.STANDARD, metric) and smallest is not MetricProfile.FULL else ""
    limited = LABEL_VALUES[MetricProfile.STANDARD].get(metric.name, {})
    values = "; ".join(", ".join(sorted(allowed)) for allowed in limited.values())
    return f"{smallest.value}{late}{f' ({values})' if values else ''}"


def metrics_reference() -> str:
    """Generate the document."""
    rest = list(AGENT_METRICS)
    text = HEAD.format(profiles="".join(map(_profile_row, MetricProfile)))
    for prefix, title in CHAPTERS:
        rows = [metric for metric in rest if metric.name.startswith(prefix)]
        rest = [metric for metric in rest if metric not in rows]
        text += f"\n## {title}\n\n| metric | meaning | labels | profile |\n|---|---|---|---|\n"
        text += "".join(
            f"| {_name_cell(metric)} | {metric.help} | {_labels_cell(metric)} | {_profile_cell(metric)} |\n"
            for metric in rows
        )
    return text


def _name_cell(metric: Metric) -> str:
    since = metric.since if metric.kind != "gauge" and metric.since != "boot" else ""
    kind = ", ".join(filter(None, (metric.kind, metric.unit, since)))
    return f"`{metric.name}`<br>{kind}"


def _labels_cell(metric: Metric) -> str:
    own = (
        tuple(label for label in metric.labels if label not in CGROUP_LABELS)
        if _is_cgroup_metric(metric)
        else metric.labels
    )
    return ", ".join((("CGROUP",) if _is_cgroup_metric(metric) else ()) + tuple(f"`{label}`" for label in own))


def _is_cgroup_metric(metric: Metric) -> bool:
    return metric.labels[: len(CGROUP_LABELS)] == CGROUP_LABELS


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(metrics_reference())
