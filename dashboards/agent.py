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
        "Whether the agents look at their nodes, what they cannot see or lose, and what they cost.",
        (),
        (
            ("At a glance", _glance()),
            ("What it sees", _sources_row()),
            ("What it loses", _losses_row()),
            ("Its neighbours", _katalyst_row()),
            ("What it costs", _cost_row()),
        ),
    )


def overdue_cycles() -> Panel:
    return stat_panel(
        "Most overdue round",
        units.Seconds,
        f"max({SNAPSHOT_AGE} - on (job, instance) dioptase_round_interval_seconds)",
        "Age of an agent's latest cycle at the scrape, minus the agent's cycle interval.",
        (5, 15),
    )


def source_states() -> Panel:
    return state_panel(
        "Sources",
        "What an agent reads, green while it answers; `dioptase doctor` on the node has the remedy. Absent is what the running "
        "kernel does not have: nothing is wrong with it, and only another kernel has it.",
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
        "Things that a node lacks; the banner of its page names each with the remedy.",
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
            "That answered Prometheus' latest request.",
        ),
        overdue_cycles(),
        stat_panel(
            "Sources down",
            units.Short,
            f'count(dioptase_source_up{{{NODE_SELECTOR},detail!="absent"}} == 0) or vector(0)',
            "Over all nodes, but for what their kernels do not have; the panel below says which.",
            (1,),
        ),
        stat_panel(
            "Rounds lost in recordings",
            units.Short,
            f"sum(increase(dioptase_recording_lost_rounds_total{{{NODE_SELECTOR}}}[1h])) or vector(0)",
            "In the last hour; the disk was full, failed, or too slow.",
            (1,),
        ),
        stat_panel(
            "CPU of the dearest agent",
            "cores",
            f"max(rate(process_cpu_seconds_total{{{NODE_SELECTOR}}}{RATE_INTERVAL}) {ON_AGENTS})",
            "Of the agent's own process.",
        ),
        stat_panel(
            "Memory of the largest agent",
            units.BytesIEC,
            f"max(process_resident_memory_bytes{{{NODE_SELECTOR}}} {ON_AGENTS})",
            "Resident. 64 MiB with 200 cgroups is what it is held to.",
        ),
    ]


def _sources_row() -> list[Panel]:
    return [
        source_states(),
        line_panel(
            "Sources, duration",
            units.Seconds,
            "Of the latest round. One that grows will make the round overrun.",
            Query(f"dioptase_source_duration_seconds{{{NODE_SELECTOR}}}", f"{{{{source}}}} {INSTANCE_LEGEND}"),
        ),
        snapshot_age(),
        line_panel(
            "Rounds by trigger",
            "rounds/s",
            "`tick` is the clock; `wait` and `psi` mean that online pods suffered in between.",
            Query(
                rate_by("dioptase_rounds_total", NODE_SELECTOR, "job, instance, trigger"),
                f"{{{{trigger}}}} {INSTANCE_LEGEND}",
            ),
            stacked=True,
        ),
        limitations(),
        line_panel(
            "Cgroups that have series",
            units.Short,
            "Beyond the setting exporters.maxCgroups they are left out, and counted on the right.",
            Query(
                f"count by (job, instance) (dioptase_cgroup_cpu_usage_seconds_total{{{NODE_SELECTOR}}})", "{{instance}}"
            ),
        ),
    ]


def _losses_row() -> list[Panel]:
    return [
        line_panel(
            "Left out of the metrics",
            "1/s",
            "Cgroups, culprits, devices and interfaces beyond their limits, counted every round.",
            Query(
                rate_by("dioptase_exporter_dropped_total", NODE_SELECTOR, "job, instance, what"),
                f"{{{{what}}}} {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Reports lost",
            units.Short,
            "1 where decisions do not reach the disk of the node, and exports that no OpenTelemetry collector took.",
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
            "Recording",
            units.BytesIEC,
            "Size on disk, where rounds are recorded.",
            Query(f"dioptase_recording_size_bytes{{{NODE_SELECTOR}}}", "{{instance}}"),
        ),
        line_panel(
            "Rounds recorded and lost",
            "rounds/s",
            "Lost ones are missing from any replay.",
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
            "By method, resource and HTTP status. 409 is a concurrent write, 429 an overloaded server, "
            "`unreachable` none at all.",
            Query(
                rate_by("dioptase_api_requests_total", NODE_SELECTOR, "job, instance, method, resource, status"),
                f"{{{{method}}}} {{{{resource}}}} {{{{status}}}} {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Calls over sockets that failed",
            "1/s",
            "Of kubelet, container runtime, QRM and plugins, made or served, by gRPC's code.",
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
            "Time since advice was last sent to an external QRM plugin, or received from an external "
            "advisor. One that grows is no longer "
            "heard.",
            Query(
                f"dioptase_advice_age_seconds{{{NODE_SELECTOR}}}",
                f"{{{{resource}}}} {{{{direction}}}} {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Containers before they start",
            "1/s",
            "Answers to the runtime's requests about containers. After `unknown` and `late` a container had its limits only "
            "from the next round on.",
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
            "Of its own process; what its probes cost is part of what they watch.",
            Query(f"rate(process_cpu_seconds_total{{{NODE_SELECTOR}}}{RATE_INTERVAL}) {ON_AGENTS}", "{{instance}}"),
        ),
        line_panel(
            "Memory of the agent",
            units.BytesIEC,
            "Resident memory of its own process.",
            Query(f"process_resident_memory_bytes{{{NODE_SELECTOR}}} {ON_AGENTS}", "{{instance}}"),
        ),
        line_panel(
            "Round, duration",
            units.Seconds,
            "A round should stay far below its interval: what it takes is CPU.",
            Query(f"dioptase_round_duration_seconds{{{NODE_SELECTOR}}}", "{{instance}}"),
        ),
        line_panel(
            "Series",
            units.Short,
            "Samples of one scrape, and how long it took in milliseconds.",
            Query(f"scrape_samples_scraped{{{NODE_SELECTOR}}} {ON_AGENTS}", "samples of {{instance}}"),
            Query(f"1000 * scrape_duration_seconds{{{NODE_SELECTOR}}} {ON_AGENTS}", "milliseconds for {{instance}}"),
        ),
    ]
