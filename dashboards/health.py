"""The agent's own health and cost: does it look, do its sources answer, what does it miss, what does it take."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.panels import NODE, RATE, Board, Panel, Query, lines, number, rate_by, states

ON = "on {{instance}}"
OURS = "and on (job, instance) dioptase_build_info"
"""Of the metrics that every program has, only those of the agent."""
TAKEN = f"dioptase_snapshot_timestamp_seconds{{{NODE}}}"
AGE = f"timestamp({TAKEN}) - {TAKEN}"
"""Of a snapshot when it was scraped, so that Prometheus' own interval is no part of it."""


def board() -> Board:
    return Board(
        "agent",
        "Dioptase: the agent's health and cost",
        "Whether the agents look at their nodes, what they cannot see or lose, and what they cost.",
        (),
        (
            ("At a glance", _glance()),
            ("What it sees", _sees()),
            ("What it loses", _loses()),
            ("Its neighbours", _neighbours()),
            ("What it costs", _costs()),
        ),
    )


def overdue() -> Panel:
    return number(
        "Most overdue round",
        units.Seconds,
        f"max({AGE} - on (job, instance) dioptase_round_interval_seconds)",
        "Age of an agent's latest look at its node when Prometheus asked, less the interval at which it is set to look.",
        (5, 15),
    )


def sources() -> Panel:
    return states(
        "Sources",
        "What an agent reads, green while it answers; `dioptase doctor` on the node has the remedy. Absent is what the running "
        "kernel does not have: nothing is wrong with it, and only another kernel has it.",
        Query(f"{_lowest('!=')} or {_lowest('=')} + 2", f"{{{{source}}}} {ON}"),
    )


def snapshot_age() -> Panel:
    return lines(
        "Snapshot age",
        units.Seconds,
        "How old an agent's latest look at its node was when Prometheus asked. Grows when it hangs; above the limit the alert "
        "DioptaseAgentSilent fires.",
        Query(AGE, "{{instance}}"),
        Query(f"15 + 3 * dioptase_round_interval_seconds{{{NODE}}}", f"limit {ON}"),
    )


def limitations() -> Panel:
    return lines(
        "Limitations",
        units.Short,
        "Things that a node lacks; the banner of its page names each with the remedy.",
        Query(f"dioptase_limitations{{{NODE}}}", "{{instance}}"),
    )


def _lowest(absent: str) -> str:
    return f'min by (job, instance, source) (dioptase_source_up{{{NODE},detail{absent}"absent"}})'


def _glance() -> list[Panel]:
    return [
        number(
            "Agents", units.Short, f"count(dioptase_build_info{{{NODE}}})", "That answered Prometheus' latest request."
        ),
        overdue(),
        number(
            "Sources down",
            units.Short,
            f'count(dioptase_source_up{{{NODE},detail!="absent"}} == 0) or vector(0)',
            "Over all nodes, but for what their kernels do not have; the panel below says which.",
            (1,),
        ),
        number(
            "Rounds lost in recordings",
            units.Short,
            f"sum(increase(dioptase_recording_lost_rounds_total{{{NODE}}}[1h])) or vector(0)",
            "In the last hour; the disk was full, failed, or too slow.",
            (1,),
        ),
        number(
            "CPU of the dearest agent",
            "cores",
            f"max(rate(process_cpu_seconds_total{{{NODE}}}{RATE}) {OURS})",
            "Of the agent's own process.",
        ),
        number(
            "Memory of the largest agent",
            units.BytesIEC,
            f"max(process_resident_memory_bytes{{{NODE}}} {OURS})",
            "Resident. 64 MiB with 200 cgroups is what it is held to.",
        ),
    ]


def _sees() -> list[Panel]:
    return [
        sources(),
        lines(
            "Sources, duration",
            units.Seconds,
            "Of the latest round. One that grows will make the round overrun.",
            Query(f"dioptase_source_duration_seconds{{{NODE}}}", f"{{{{source}}}} {ON}"),
        ),
        snapshot_age(),
        lines(
            "Rounds by trigger",
            "rounds/s",
            "`tick` is the clock; `wait` and `psi` mean that online pods suffered in between.",
            Query(rate_by("dioptase_rounds_total", NODE, "job, instance, trigger"), f"{{{{trigger}}}} {ON}"),
            stacked=True,
        ),
        limitations(),
        lines(
            "Cgroups that have series",
            units.Short,
            "Beyond the setting exporters.maxCgroups they are left out, and counted on the right.",
            Query(f"count by (job, instance) (dioptase_cgroup_cpu_usage_seconds_total{{{NODE}}})", "{{instance}}"),
        ),
    ]


def _loses() -> list[Panel]:
    return [
        lines(
            "Left out of the metrics",
            "1/s",
            "Cgroups, culprits, devices and interfaces beyond their limits, counted every round.",
            Query(rate_by("dioptase_exporter_dropped_total", NODE, "job, instance, what"), f"{{{{what}}}} {ON}"),
        ),
        lines(
            "Reports lost",
            units.Short,
            "1 where decisions do not reach the disk of the node, and exports that no OpenTelemetry collector took.",
            Query(f"1 - dioptase_journal_writable{{{NODE}}}", f"journal {ON}"),
            Query(f"increase(dioptase_otel_failures_total{{{NODE}}}{RATE})", f"exports {ON}"),
            Query(f"increase(dioptase_otel_dropped_spans_total{{{NODE}}}{RATE})", f"spans {ON}"),
        ),
        lines(
            "Recording",
            units.BytesIEC,
            "Size on disk, where rounds are recorded.",
            Query(f"dioptase_recording_size_bytes{{{NODE}}}", "{{instance}}"),
        ),
        lines(
            "Rounds recorded and lost",
            "rounds/s",
            "Lost ones are missing from any replay.",
            Query(rate_by("dioptase_recording_rounds_total", NODE, "job, instance"), f"recorded {ON}"),
            Query(rate_by("dioptase_recording_lost_rounds_total", NODE, "job, instance"), f"lost {ON}"),
        ),
    ]


def _neighbours() -> list[Panel]:
    return [
        lines(
            "Requests to the API server",
            "1/s",
            "By method, resource and HTTP status. 409 is somebody else's write in between, 429 a server that wants less, "
            "`unreachable` none at all.",
            Query(
                rate_by("dioptase_api_requests_total", NODE, "job, instance, method, resource, status"),
                f"{{{{method}}}} {{{{resource}}}} {{{{status}}}} {ON}",
            ),
        ),
        lines(
            "Calls over sockets that failed",
            "1/s",
            "Of kubelet, container runtime, QRM and plugins, made or served, by gRPC's code.",
            Query(
                rate_by("dioptase_protocol_calls_total", f'{NODE},code!="OK"', "job, instance, side, method, code"),
                f"{{{{side}}}} {{{{method}}}} {{{{code}}}} {ON}",
            ),
        ),
        lines(
            "Age of advice",
            units.Seconds,
            "Since advice was last given to somebody else's QRM plugin, or taken from an advisor. One that grows is no longer "
            "heard.",
            Query(f"dioptase_advice_age_seconds{{{NODE}}}", f"{{{{resource}}}} {{{{direction}}}} {ON}"),
        ),
        lines(
            "Containers before they start",
            "1/s",
            "What was answered when the runtime asked about them. After `unknown` and `late` a container had its limits only "
            "from the next round on.",
            Query(rate_by("dioptase_nri_containers_total", NODE, "job, instance, answer"), f"{{{{answer}}}} {ON}"),
        ),
    ]


def _costs() -> list[Panel]:
    return [
        lines(
            "CPU of the agent",
            "cores",
            "Of its own process; what its probes cost is part of what they watch.",
            Query(f"rate(process_cpu_seconds_total{{{NODE}}}{RATE}) {OURS}", "{{instance}}"),
        ),
        lines(
            "Memory of the agent",
            units.BytesIEC,
            "Resident memory of its own process.",
            Query(f"process_resident_memory_bytes{{{NODE}}} {OURS}", "{{instance}}"),
        ),
        lines(
            "Round, duration",
            units.Seconds,
            "A round should stay far below its interval: what it takes is CPU.",
            Query(f"dioptase_round_duration_seconds{{{NODE}}}", "{{instance}}"),
        ),
        lines(
            "Series",
            units.Short,
            "Samples of one scrape, and how long it took in milliseconds.",
            Query(f"scrape_samples_scraped{{{NODE}}} {OURS}", "samples of {{instance}}"),
            Query(f"1000 * scrape_duration_seconds{{{NODE}}} {OURS}", "milliseconds for {{instance}}"),
        ),
    ]
