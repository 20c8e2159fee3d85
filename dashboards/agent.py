"""The agent dashboard: the agent's own health and cost, its sources, its losses and its Katalyst peers."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.panels import (
    NODE_SELECTOR,
    RATE_INTERVAL,
    Board,
    Panel,
    Query,
    line_panel,
    rate_by,
    stat_panel,
    state_panel,
)

INSTANCE_LEGEND = "on {{instance}}"
ON_AGENTS = "and on (job, instance) dioptase_build_info"
"""Of the metrics that every program has, only those of the agent."""
SNAPSHOT_TIME = f"dioptase_snapshot_timestamp_seconds{{{NODE_SELECTOR}}}"
SNAPSHOT_AGE = f"timestamp({SNAPSHOT_TIME}) - {SNAPSHOT_TIME}"
"""Of a snapshot when it was scraped, so that Prometheus' own interval is no part of it."""


def board() -> Board:
    return Board(
        "agent",
        "Dioptase: the agent's health and cost",
        "Whether the agents run their cycles, which data they lack or lose, and their CPU and memory.",
        (),
        (
            ("Summary", _glance()),
            ("Sources", _sources_row()),
            ("Lost data", _losses_row()),
            ("API server, kubelet, runtime and plugins", _katalyst_row()),
            ("Cost", _cost_row()),
        ),
    )


def overdue_cycles() -> Panel:
    return stat_panel(
        "Longest overdue cycle",
        units.Seconds,
        f"max({SNAPSHOT_AGE} - on (job, instance) dioptase_round_interval_seconds)",
        "Age of an agent's latest cycle at the scrape, minus the agent's cycle interval.",
        (5, 15),
    )


def source_states() -> Panel:
    return state_panel(
        "Sources",
        (
            "Green while the source can be read; `dioptase doctor` on the node names the remedy. Absent: the running "
            "kernel lacks the feature."
        ),
        Query(f"{_lowest('!=')} or {_lowest('=')} + 2", f"{{{{source}}}} {INSTANCE_LEGEND}"),
    )


def snapshot_age() -> Panel:
    return line_panel(
        "Snapshot age",
        units.Seconds,
        "Age of an agent's latest cycle at the scrape. It grows when the agent hangs; above the limit the alert "
        "DioptaseAgentSilent fires.",
        Query(SNAPSHOT_AGE, "{{instance}}"),
        Query(f"15 + 3 * dioptase_round_interval_seconds{{{NODE_SELECTOR}}}", f"limit {INSTANCE_LEGEND}"),
    )


def limitations() -> Panel:
    return line_panel(
        "Limitations",
        units.Short,
        "Features that a node lacks. The banner of the agent's page names each with its remedy.",
        Query(f"dioptase_limitations{{{NODE_SELECTOR}}}", "{{instance}}"),
    )


def _lowest(absent: str) -> str:
    return f'min by (job, instance, source) (dioptase_source_up{{{NODE_SELECTOR},detail{absent}"absent"}})'


def _glance() -> list[Panel]:
    return [
        stat_panel(
            "Agents",
            units.Short,
            f"count(dioptase_build_info{{{NODE_SELECTOR}}})",
            "Agents that answered Prometheus' latest scrape.",
        ),
        overdue_cycles(),
        stat_panel(
            "Failed sources",
            units.Short,
            f'count(dioptase_source_up{{{NODE_SELECTOR},detail!="absent"}} == 0) or vector(0)',
            "On all nodes, without features that their kernels lack. The panel below names them.",
            (1,),
        ),
        stat_panel(
            "Cycles lost from recordings",
            units.Short,
            f"sum(increase(dioptase_recording_lost_rounds_total{{{NODE_SELECTOR}}}[1h])) or vector(0)",
            "In the last hour, because the disk was full, failed, or was too slow.",
            (1,),
        ),
        stat_panel(
            "CPU of the most expensive agent",
            "cores",
            f"max(rate(process_cpu_seconds_total{{{NODE_SELECTOR}}}{RATE_INTERVAL}) {ON_AGENTS})",
            "CPU time of the agent's own process.",
        ),
        stat_panel(
            "Memory of the largest agent",
            units.BytesIEC,
            f"max(process_resident_memory_bytes{{{NODE_SELECTOR}}} {ON_AGENTS})",
            "Resident memory. Expect 64 MiB with 200 cgroups.",
        ),
    ]


def _sources_row() -> list[Panel]:
    return [
        source_states(),
        line_panel(
            "Sources, duration",
            units.Seconds,
            "Of the latest cycle. If one keeps growing, cycles will take longer than their interval.",
            Query(f"dioptase_source_duration_seconds{{{NODE_SELECTOR}}}", f"{{{{source}}}} {INSTANCE_LEGEND}"),
        ),
        snapshot_age(),
        line_panel(
            "Cycles by trigger",
            "rounds/s",
            (
                "`tick`: the regular interval. `wait` and `psi`: started early, because online pods waited for CPU or a "
                "pressure trigger fired. `journalled`: original values of new controls are on disk."
            ),
            Query(
                rate_by("dioptase_rounds_total", NODE_SELECTOR, "job, instance, trigger"),
                f"{{{{trigger}}}} {INSTANCE_LEGEND}",
            ),
            stacked=True,
        ),
        limitations(),
        line_panel(
            "Cgroups with series",
            units.Short,
            "Cgroups beyond the setting exporters.maxCgroups have no series; they are counted on the right.",
            Query(
                f"count by (job, instance) (dioptase_cgroup_cpu_usage_seconds_total{{{NODE_SELECTOR}}})", "{{instance}}"
            ),
        ),
    ]


def _losses_row() -> list[Panel]:
    return [
        line_panel(
            "Omitted from the metrics",
            "1/s",
            "Cgroups, aggressors, devices and interfaces beyond their limits, counted in every cycle.",
            Query(
                rate_by("dioptase_exporter_dropped_total", NODE_SELECTOR, "job, instance, what"),
                f"{{{{what}}}} {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Lost reports",
            units.Short,
            "1: decisions cannot be written to the node's disk. Also exports that failed at the OpenTelemetry collector.",
            Query(f"1 - dioptase_journal_writable{{{NODE_SELECTOR}}}", f"journal {INSTANCE_LEGEND}"),
            Query(
                f"increase(dioptase_otel_failures_total{{{NODE_SELECTOR}}}{RATE_INTERVAL})",
                f"exports {INSTANCE_LEGEND}",
            ),
            Query(
                f"increase(dioptase_otel_dropped_spans_total{{{NODE_SELECTOR}}}{RATE_INTERVAL})",
                f"spans {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Time to save a state file",
            units.Seconds,
            "Mean time until a file of the state directory is on disk, and the age of a write that has not ended.",
            Query(
                f"{rate_by('dioptase_state_sync_seconds_total', NODE_SELECTOR, 'job, instance, file')}"
                f" / {rate_by('dioptase_state_syncs_total', NODE_SELECTOR, 'job, instance, file')}",
                f"{{{{file}}}} {INSTANCE_LEGEND}",
            ),
            Query(f"dioptase_state_sync_pending_seconds{{{NODE_SELECTOR}}}", f"not ended {INSTANCE_LEGEND}"),
        ),
        line_panel(
            "Recording",
            units.BytesIEC,
            "Size on disk of the recorded cycles.",
            Query(f"dioptase_recording_size_bytes{{{NODE_SELECTOR}}}", "{{instance}}"),
        ),
        line_panel(
            "Cycles recorded and lost",
            "rounds/s",
            "Lost cycles are missing from replays.",
            Query(
                rate_by("dioptase_recording_rounds_total", NODE_SELECTOR, "job, instance"),
                f"recorded {INSTANCE_LEGEND}",
            ),
            Query(
                rate_by("dioptase_recording_lost_rounds_total", NODE_SELECTOR, "job, instance"),
                f"lost {INSTANCE_LEGEND}",
            ),
        ),
    ]


def _katalyst_row() -> list[Panel]:
    return [
        line_panel(
            "Requests to the API server",
            "1/s",
            (
                "By method, resource and HTTP status. 409: a concurrent write. 429: an overloaded server. `unreachable`: no "
                "answer."
            ),
            Query(
                rate_by("dioptase_api_requests_total", NODE_SELECTOR, "job, instance, method, resource, status"),
                f"{{{{method}}}} {{{{resource}}}} {{{{status}}}} {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Failed gRPC calls",
            "1/s",
            "To and from the kubelet, the container runtime, QRM and plugins, by gRPC status code.",
            Query(
                rate_by(
                    "dioptase_protocol_calls_total", f'{NODE_SELECTOR},code!="OK"', "job, instance, side, method, code"
                ),
                f"{{{{side}}}} {{{{method}}}} {{{{code}}}} {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Age of advice",
            units.Seconds,
            (
                "Time since advice was last sent to an external QRM plugin, or received from an external advisor. If it "
                "grows, the peer no longer answers."
            ),
            Query(
                f"dioptase_advice_age_seconds{{{NODE_SELECTOR}}}",
                f"{{{{resource}}}} {{{{direction}}}} {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Answers to the container runtime (NRI)",
            "1/s",
            (
                "Answers to requests of the runtime that creates a container. After `unknown` and `late` the limits apply "
                "from the next cycle on."
            ),
            Query(
                rate_by("dioptase_nri_containers_total", NODE_SELECTOR, "job, instance, answer"),
                f"{{{{answer}}}} {INSTANCE_LEGEND}",
            ),
        ),
    ]


def _cost_row() -> list[Panel]:
    return [
        line_panel(
            "CPU of the agent",
            "cores",
            "CPU time of the agent's own process. The cost of its probes is charged to the tasks that they measure.",
            Query(f"rate(process_cpu_seconds_total{{{NODE_SELECTOR}}}{RATE_INTERVAL}) {ON_AGENTS}", "{{instance}}"),
        ),
        line_panel(
            "Memory of the agent",
            units.BytesIEC,
            "Resident memory of its own process.",
            Query(f"process_resident_memory_bytes{{{NODE_SELECTOR}}} {ON_AGENTS}", "{{instance}}"),
        ),
        line_panel(
            "Cycle, duration",
            units.Seconds,
            "Should stay far below the interval: the duration of a cycle is CPU time.",
            Query(f"dioptase_round_duration_seconds{{{NODE_SELECTOR}}}", "{{instance}}"),
        ),
        line_panel(
            "Series",
            units.Short,
            "Samples of one scrape, and its duration in milliseconds.",
            Query(f"scrape_samples_scraped{{{NODE_SELECTOR}}} {ON_AGENTS}", "samples of {{instance}}"),
            Query(f"1000 * scrape_duration_seconds{{{NODE_SELECTOR}}} {ON_AGENTS}", "milliseconds for {{instance}}"),
        ),
    ]
