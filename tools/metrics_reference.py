"""Generates docs/metrics.md from the metric catalogue: `python -m tools.metrics_reference docs/metrics.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from api.metrics import AGENT_METRICS, CGROUP_LABELS, COARSE_BOUNDS_S, RUNQ_LATENCY_BOUNDS_S, Metric
from exporters.prometheus.cgroup_families import MAX_AGGRESSORS_PER_CGROUP, MAX_DEVICES_PER_CGROUP
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
    (("dioptase_decisions_", "dioptase_rounds_"), "Decisions"),
    ("dioptase_", "The agent itself"),
)
HEAD = f"""# Metrics

Generated from `api/metrics.py` by `python -m tools.metrics_reference docs/metrics.md`; edit that file instead of this one.

`/metrics` serves the Prometheus text format or OpenMetrics, as requested. If `OTEL_EXPORTER_OTLP_ENDPOINT` is set, the same
metrics are sent to an OpenTelemetry collector by OTLP, together with those for which OpenTelemetry has names of its own
(`system.*`, `container.*`, `k8s.*`). All of them show the snapshot that the advisor evaluated.

- A value that the kernel, the cgroup hierarchy or the agent's privileges do not provide has no sample: never 0, never -1.
- `CGROUP` stands for the labels {", ".join(f"`{label}`" for label in CGROUP_LABELS)}; all but the first are empty if no
  listed pod owns the cgroup. Only a container's own cgroup has pod labels, so sums over pods count nothing twice.
- CPU, memory, pressure and I/O of a cgroup include its descendants, as the kernel counts them. Values of probes do not:
  run-queue latency and blame, throttles, hardware counters, thread states, loads, reclaim, OOM kills, block I/O requests
  and sockets are those of the cgroup's own tasks. Every description says which it is. The page and `dioptase top` add them up
  for a listed container with cgroups below; a query does so with `cgroup=~"/web(/.*)?"`.
- Names of kinds, events, modes and vectors are the kernel's. `device` is a disk's name, or `MAJOR:MINOR` if the node
  does not list it.
- Run-queue latency is a histogram with {len(RUNQ_LATENCY_BOUNDS_S)} bounds from 1 us to 34 s, each twice the previous one.
  If the kernel supports no probe, it has one bucket: count and sum are known, from `/proc/PID/schedstat`, but not the
  distribution.
- Throttles, reclaim and block I/O have {len(COARSE_BOUNDS_S)} bounds from 16 us to 17 s, each four times the previous one.
- In OpenMetrics, decisions, cycles and the longest wait of each pod in the latest cycle (by the bound of its bucket) have an
  exemplar with the `round` and, if spans are sent to OpenTelemetry, its `trace_id` and `span_id`. Histograms are classic:
  neither text format supports native ones.
- The number of series is bounded: `exporters.maxCgroups` cgroups (those of pods first, then those nearest to the root), and
  for each the {MAX_AGGRESSORS_PER_CGROUP} culprits with the largest share of its latency and {MAX_DEVICES_PER_CGROUP} devices;
  {MAX_INTERFACES} network interfaces.
  `dioptase_exporter_dropped_total` counts what was left out. A cgroup with all metrics has about 200 series.
- Counters of the kernel start at boot or at the creation of the cgroup, those of a pod at its start. Counters of the agent,
  marked in the table, start with the agent.
- `process_*` are the agent's own, from the Prometheus client library.
"""


def metrics_reference() -> str:
    """Generate the document."""
    rest = list(AGENT_METRICS)
    text = HEAD
    for prefix, title in CHAPTERS:
        rows = [metric for metric in rest if metric.name.startswith(prefix)]
        rest = [metric for metric in rest if metric not in rows]
        text += f"\n## {title}\n\n| metric | meaning | labels |\n| --- | --- | --- |\n"
        text += "".join(f"| {_name_cell(metric)} | {metric.help} | {_labels_cell(metric)} |\n" for metric in rows)
    return text


def _name_cell(metric: Metric) -> str:
    counts = metric.kind != "gauge" and metric.since == "agent"
    kind = ", ".join(filter(None, (metric.kind, metric.unit, "from the agent's start" if counts else "")))
    return f"`{metric.name}`<br>{kind}<br>OTel: `{metric.otel_name}`"


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
