"""One node: what its CPUs do, what stalls, what its disks and its network carry."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.panels import NODE, RATE, Board, Panel, Query, lines, most, number, rate_by

CPU = "dioptase_node_cpu_seconds_total"
PRESSURE = "dioptase_node_pressure_seconds_total"
ON = "on {{instance}}"


def board() -> Board:
    return Board(
        "node",
        "Dioptase: node",
        "What the CPUs of a node do, how much work waits for them, for memory and for disks, and what goes in and out.",
        (),
        (
            ("At a glance", _glance()),
            ("CPU", _cpu()),
            ("Pressure", _pressure()),
            ("Disks", _disks()),
            ("Network", _network()),
        ),
    )


def _stalled(resource: str, kind: str = "some") -> str:
    return f'max(rate({PRESSURE}{{{NODE},resource="{resource}",kind="{kind}"}}{RATE}))'


def _glance() -> list[Panel]:
    busy = f'sum(rate({CPU}{{{NODE},mode!~"idle|iowait|steal"}}{RATE}))'
    available = f"dioptase_node_memory_available_bytes{{{NODE}}} / dioptase_node_memory_total_bytes{{{NODE}}}"
    return [
        number(
            "CPU use",
            units.PercentUnit,
            f"{busy} / sum(dioptase_node_cpus{{{NODE}}})",
            "Share of all CPUs that run something.",
        ),
        number(
            "Tasks waiting",
            "tasks",
            f"sum(rate(dioptase_cgroup_runq_wait_seconds_sum{{{NODE}}}{RATE}))",
            "Mean number of tasks that could run and did not. Above zero at low use: bursts, or quotas.",
        ),
        number(
            "CPU pressure",
            units.PercentUnit,
            _stalled("cpu"),
            "Share of time in which some task waited for a CPU, of the worst node.",
            (0.3, 0.6),
        ),
        number(
            "Memory pressure",
            units.PercentUnit,
            _stalled("memory"),
            "Share of time in which some task waited for memory, of the worst node. Little is much: 1 % is felt.",
            (0.01, 0.1),
        ),
        number(
            "I/O pressure",
            units.PercentUnit,
            _stalled("io"),
            "Share of time in which some task waited for a disk, of the worst node.",
            (0.2, 0.5),
        ),
        number(
            "Memory that could be had",
            units.PercentUnit,
            f"min({available})",
            "Without swapping, of the worst node.",
            (),
        ),
    ]


def _cpu() -> list[Panel]:
    busy = f'sum by (job, instance, cpu) (rate(dioptase_node_percpu_seconds_total{{{NODE},mode!~"idle|iowait|steal"}}{RATE}))'
    return [
        lines(
            "Use by mode",
            "cores",
            "Steal is time that the hypervisor gave to somebody else.",
            Query(rate_by(CPU, f'{NODE},mode!="idle"', "job, instance, mode"), f"{{{{mode}}}} {ON}"),
            stacked=True,
        ),
        lines(
            "Busiest CPUs",
            units.PercentUnit,
            "One CPU at its end while others idle: an interrupt, a pinned task, a small cpuset.",
            Query(most(busy), f"CPU {{{{cpu}}}} {ON}"),
        ),
        lines(
            "Tasks waiting for each CPU",
            "tasks",
            "Mean number of tasks in the run queue of a CPU that did not run (schedstat).",
            Query(
                most(rate_by("dioptase_node_run_delay_seconds_total", NODE, "job, instance, cpu")),
                f"CPU {{{{cpu}}}} {ON}",
            ),
        ),
        lines(
            "Deferred interrupt work",
            "cores",
            "CPU in soft interrupts by vector: network and block work that no cgroup is charged for.",
            Query(
                rate_by("dioptase_node_softirq_seconds_total", NODE, "job, instance, vector"), f"{{{{vector}}}} {ON}"
            ),
            stacked=True,
        ),
        lines(
            "Load and tasks",
            units.Short,
            "Load counts tasks that run, want to, or sleep uninterruptibly. Far above the CPUs with time left: the last.",
            Query(f"dioptase_node_load1{{{NODE}}}", f"1 minute {ON}"),
            Query(f"dioptase_node_load5{{{NODE}}}", f"5 minutes {ON}"),
            Query(f"dioptase_node_procs_running{{{NODE}}}", f"running {ON}"),
            Query(f"dioptase_node_procs_blocked{{{NODE}}}", f"blocked on I/O {ON}"),
            Query(f"dioptase_node_cpus{{{NODE}}}", f"CPUs {ON}"),
        ),
        lines(
            "Interrupts",
            "1/s",
            "All kinds together, by CPU; on one CPU alone they slow whoever runs there.",
            Query(most(rate_by("dioptase_node_interrupts_total", NODE, "job, instance, cpu")), f"CPU {{{{cpu}}}} {ON}"),
        ),
    ]


def _pressure() -> list[Panel]:
    def of(kind: str) -> Query:
        return Query(rate_by(PRESSURE, f'{NODE},kind="{kind}"', "job, instance, resource"), f"{{{{resource}}}} {ON}")

    return [
        lines(
            "Some task stalled",
            units.PercentUnit,
            "Share of time in which at least one task waited for the resource.",
            of("some"),
        ),
        lines(
            "All tasks stalled",
            units.PercentUnit,
            "Share of time in which nobody got on: lost work. Above a few percent it is felt.",
            of("full"),
        ),
    ]


def _disks() -> list[Panel]:
    took = rate_by("dioptase_node_disk_operation_seconds_total", NODE, "job, instance, device, operation")
    done = rate_by("dioptase_node_disk_operations_total", NODE, "job, instance, device, operation")
    return [
        lines(
            "Busy",
            units.PercentUnit,
            "Share of time with a request in flight. A disk that works in parallel is not full at 100 %.",
            Query(
                most(rate_by("dioptase_node_disk_busy_seconds_total", NODE, "job, instance, device")),
                f"{{{{device}}}} {ON}",
            ),
        ),
        lines(
            "Time of a request, mean",
            units.Seconds,
            "From the queue to completion; no line without requests.",
            Query(most(f"{took} / ({done} > 0)"), f"{{{{device}}}}: {{{{operation}}}} {ON}"),
        ),
        lines(
            "Bytes read and written",
            units.BytesPerSecondSI,
            "By device.",
            Query(
                most(rate_by("dioptase_node_disk_bytes_total", NODE, "job, instance, device, operation")),
                f"{{{{device}}}}: {{{{operation}}}} {ON}",
            ),
        ),
        lines(
            "Room on file systems",
            units.PercentUnit,
            "Free for whoever is not root.",
            Query(
                f"dioptase_node_filesystem_available_bytes{{{NODE}}} / dioptase_node_filesystem_size_bytes{{{NODE}}}",
                f"{{{{mountpoint}}}} {ON}",
            ),
        ),
    ]


def _network() -> list[Panel]:
    def events(name: str) -> str:
        return rate_by("dioptase_node_network_events_total", f'{NODE},event="{name}"', "job, instance")

    return [
        lines(
            "Bytes by interface",
            units.BytesPerSecondSI,
            "Received and sent; a pod's own interface counts again what the node's carries.",
            Query(
                most(rate_by("dioptase_node_network_bytes_total", NODE, "job, instance, interface, direction")),
                f"{{{{interface}}}}: {{{{direction}}}} {ON}",
            ),
        ),
        lines(
            "Lost",
            "packets/s",
            "Packets dropped by the kernel and lost to errors.",
            Query(
                most(rate_by("dioptase_node_network_drops_total", NODE, "job, instance, interface, direction")),
                f"{{{{interface}}}}: {{{{direction}}}} dropped {ON}",
            ),
            Query(
                most(rate_by("dioptase_node_network_errors_total", NODE, "job, instance, interface, direction")),
                f"{{{{interface}}}}: {{{{direction}}}} errors {ON}",
            ),
        ),
        lines(
            "Bandwidth promised to pods",
            "Mbits",
            "What pods ask for of each card, beside what it can promise. `dioptase explain POD` says which card is whose.",
            Query(f"dioptase_network_promised_mbit{{{NODE}}}", f"{{{{interface}}}}: promised {ON}"),
            Query(f"dioptase_network_capacity_mbit{{{NODE}}}", f"{{{{interface}}}}: {{{{direction}}}} at most {ON}"),
        ),
        lines(
            "TCP segments sent again",
            units.PercentUnit,
            "Share of all that were sent. Above 1 % connections are slow.",
            Query(f"{events('Tcp.RetransSegs')} / ({events('Tcp.OutSegs')} > 0)", ON),
        ),
        lines(
            "TCP sockets",
            units.Short,
            "By state. Many in close_wait: a program that does not close.",
            Query(f"sum by (job, instance, state) (dioptase_node_tcp_sockets{{{NODE}}})", f"{{{{state}}}} {ON}"),
        ),
    ]
