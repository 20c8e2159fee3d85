"""The node dashboard: CPU use, pressure, disks and network of one node."""

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
    top_series,
)

CPU = "dioptase_node_cpu_seconds_total"
PRESSURE = "dioptase_node_pressure_seconds_total"
INSTANCE_LEGEND = "on {{instance}}"


def board() -> Board:
    return Board(
        "node",
        "Dioptase: node",
        "Use of a node's CPUs, disks and network, and the tasks that wait for CPU, memory and I/O.",
        (),
        (
            ("Summary", _glance()),
            ("CPU", _cpu()),
            ("Pressure", _pressure()),
            ("Disks", _disks()),
            ("Network", _network()),
        ),
    )


def _stalled(resource: str, kind: str = "some") -> str:
    return f'max(rate({PRESSURE}{{{NODE_SELECTOR},resource="{resource}",kind="{kind}"}}{RATE_INTERVAL}))'


def _glance() -> list[Panel]:
    busy = f'sum(rate({CPU}{{{NODE_SELECTOR},mode!~"idle|iowait|steal"}}{RATE_INTERVAL}))'
    available = (
        f"dioptase_node_memory_available_bytes{{{NODE_SELECTOR}}} / dioptase_node_memory_total_bytes{{{NODE_SELECTOR}}}"
    )
    return [
        stat_panel(
            "CPU use",
            units.PercentUnit,
            f"{busy} / sum(dioptase_node_cpus{{{NODE_SELECTOR}}})",
            "Share of the CPU time of all CPUs that is not idle.",
        ),
        stat_panel(
            "Tasks waiting",
            "tasks",
            f"sum(rate(dioptase_cgroup_runq_wait_seconds_sum{{{NODE_SELECTOR}}}{RATE_INTERVAL}))",
            "Mean number of runnable tasks without a CPU. Above 0 at low use: bursts or quotas.",
        ),
        stat_panel(
            "CPU pressure",
            units.PercentUnit,
            _stalled("cpu"),
            "Share of time in which some task waited for a CPU, of the worst node.",
            (0.3, 0.6),
        ),
        stat_panel(
            "Memory pressure",
            units.PercentUnit,
            _stalled("memory"),
            "Share of time in which some task waited for memory, of the worst node. Little is much: 1 % is felt.",
            (0.01, 0.1),
        ),
        stat_panel(
            "I/O pressure",
            units.PercentUnit,
            _stalled("io"),
            "Share of time in which some task waited for a disk, of the worst node.",
            (0.2, 0.5),
        ),
        stat_panel(
            "Available memory",
            units.PercentUnit,
            f"min({available})",
            "Without swapping, on the node with the least.",
            (),
        ),
    ]


def _cpu() -> list[Panel]:
    selector = f'{NODE_SELECTOR},mode!~"idle|iowait|steal"'
    busy = f"sum by (job, instance, cpu) (rate(dioptase_node_percpu_seconds_total{{{selector}}}{RATE_INTERVAL}))"
    return [
        line_panel(
            "Use by mode",
            "cores",
            "Steal: time in which the hypervisor ran other guests.",
            Query(
                rate_by(CPU, f'{NODE_SELECTOR},mode!="idle"', "job, instance, mode"), f"{{{{mode}}}} {INSTANCE_LEGEND}"
            ),
            stacked=True,
        ),
        line_panel(
            "Busiest CPUs",
            units.PercentUnit,
            "One busy CPU beside idle ones: an interrupt, a pinned task, or a small cpuset.",
            Query(top_series(busy), f"CPU {{{{cpu}}}} {INSTANCE_LEGEND}"),
        ),
        line_panel(
            "Tasks waiting for each CPU",
            "tasks",
            "Mean number of tasks that waited in the run queue of a CPU (schedstat).",
            Query(
                top_series(rate_by("dioptase_node_run_delay_seconds_total", NODE_SELECTOR, "job, instance, cpu")),
                f"CPU {{{{cpu}}}} {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Deferred interrupt work",
            "cores",
            "CPU time of soft interrupts by vector. Network and block work is not charged to any cgroup.",
            Query(
                rate_by("dioptase_node_softirq_seconds_total", NODE_SELECTOR, "job, instance, vector"),
                f"{{{{vector}}}} {INSTANCE_LEGEND}",
            ),
            stacked=True,
        ),
        line_panel(
            "Load and tasks",
            units.Short,
            "Running, runnable and uninterruptible tasks. High while CPUs are idle: uninterruptible ones.",
            Query(f"dioptase_node_load1{{{NODE_SELECTOR}}}", f"1 minute {INSTANCE_LEGEND}"),
            Query(f"dioptase_node_load5{{{NODE_SELECTOR}}}", f"5 minutes {INSTANCE_LEGEND}"),
            Query(f"dioptase_node_procs_running{{{NODE_SELECTOR}}}", f"running {INSTANCE_LEGEND}"),
            Query(f"dioptase_node_procs_blocked{{{NODE_SELECTOR}}}", f"blocked on I/O {INSTANCE_LEGEND}"),
            Query(f"dioptase_node_cpus{{{NODE_SELECTOR}}}", f"CPUs {INSTANCE_LEGEND}"),
        ),
        line_panel(
            "Interrupts",
            "1/s",
            "All interrupts by CPU. If one CPU gets most of them, they slow every task on it.",
            Query(
                top_series(rate_by("dioptase_node_interrupts_total", NODE_SELECTOR, "job, instance, cpu")),
                f"CPU {{{{cpu}}}} {INSTANCE_LEGEND}",
            ),
        ),
    ]


def _pressure() -> list[Panel]:
    def of(kind: str) -> Query:
        return Query(
            rate_by(PRESSURE, f'{NODE_SELECTOR},kind="{kind}"', "job, instance, resource"),
            f"{{{{resource}}}} {INSTANCE_LEGEND}",
        )

    return [
        line_panel(
            "Some task stalled",
            units.PercentUnit,
            "Share of time in which at least one task waited for the resource.",
            of("some"),
        ),
        line_panel(
            "All tasks stalled",
            units.PercentUnit,
            "Share of time in which all tasks were stalled. More than a few percent is noticeable.",
            of("full"),
        ),
    ]


def _disks() -> list[Panel]:
    took = rate_by("dioptase_node_disk_operation_seconds_total", NODE_SELECTOR, "job, instance, device, operation")
    done = rate_by("dioptase_node_disk_operations_total", NODE_SELECTOR, "job, instance, device, operation")
    return [
        line_panel(
            "Busy",
            units.PercentUnit,
            "Share of time with a request in flight. A disk that serves requests in parallel is not saturated at 100 %.",
            Query(
                top_series(rate_by("dioptase_node_disk_busy_seconds_total", NODE_SELECTOR, "job, instance, device")),
                f"{{{{device}}}} {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Request duration, mean",
            units.Seconds,
            "From the queue to completion; no line without requests.",
            Query(top_series(f"{took} / ({done} > 0)"), f"{{{{device}}}}: {{{{operation}}}} {INSTANCE_LEGEND}"),
        ),
        line_panel(
            "Bytes read and written",
            units.BytesPerSecondSI,
            "By device.",
            Query(
                top_series(
                    rate_by("dioptase_node_disk_bytes_total", NODE_SELECTOR, "job, instance, device, operation")
                ),
                f"{{{{device}}}}: {{{{operation}}}} {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Free space of file systems",
            units.PercentUnit,
            "Free space for users other than root.",
            Query(
                f"dioptase_node_filesystem_available_bytes{{{NODE_SELECTOR}}} / "
                f"dioptase_node_filesystem_size_bytes{{{NODE_SELECTOR}}}",
                f"{{{{mountpoint}}}} {INSTANCE_LEGEND}",
            ),
        ),
    ]


def _tcp() -> list[Panel]:
    def events(name: str) -> str:
        return rate_by("dioptase_node_network_events_total", f'{NODE_SELECTOR},event="{name}"', "job, instance")

    return [
        line_panel(
            "TCP retransmits",
            units.PercentUnit,
            "Share of all segments sent. Above 1 % connections are slow.",
            Query(f"{events('Tcp.RetransSegs')} / ({events('Tcp.OutSegs')} > 0)", INSTANCE_LEGEND),
        ),
        line_panel(
            "TCP sockets",
            units.Short,
            "By state. Many in close_wait: a program that does not close.",
            Query(
                f"sum by (job, instance, state) (dioptase_node_tcp_sockets{{{NODE_SELECTOR}}})",
                f"{{{{state}}}} {INSTANCE_LEGEND}",
            ),
        ),
    ]


def _network() -> list[Panel]:
    return [
        line_panel(
            "Bytes by interface",
            units.BytesPerSecondSI,
            "Received and sent. Traffic of pods counts at their interface and at the node's.",
            Query(
                top_series(
                    rate_by("dioptase_node_network_bytes_total", NODE_SELECTOR, "job, instance, interface, direction")
                ),
                f"{{{{interface}}}}: {{{{direction}}}} {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Dropped and erroneous packets",
            "packets/s",
            "Packets that the kernel dropped, and packets with errors.",
            Query(
                top_series(
                    rate_by("dioptase_node_network_drops_total", NODE_SELECTOR, "job, instance, interface, direction")
                ),
                f"{{{{interface}}}}: {{{{direction}}}} dropped {INSTANCE_LEGEND}",
            ),
            Query(
                top_series(
                    rate_by("dioptase_node_network_errors_total", NODE_SELECTOR, "job, instance, interface, direction")
                ),
                f"{{{{interface}}}}: {{{{direction}}}} errors {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Bandwidth guaranteed to pods",
            "Mbits",
            "Requests of pods on each card, and its capacity. `dioptase explain POD` shows the card of a pod.",
            Query(
                f"dioptase_network_promised_mbit{{{NODE_SELECTOR}}}", f"{{{{interface}}}}: guaranteed {INSTANCE_LEGEND}"
            ),
            Query(
                f"dioptase_network_capacity_mbit{{{NODE_SELECTOR}}}",
                f"{{{{interface}}}}: {{{{direction}}}} at most {INSTANCE_LEGEND}",
            ),
        ),
        *_tcp(),
    ]
