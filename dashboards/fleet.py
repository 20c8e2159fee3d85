"""The fleet dashboard: reclaimable resources and interference of all nodes, the scheduler, agents, controller and rollouts."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.agent import SNAPSHOT_AGE
from dashboards.colocation import interference
from dashboards.panels import (
    LATENCY_TARGET,
    NODE_SELECTOR,
    RATE_INTERVAL,
    RECLAIMED_SELECTOR,
    Board,
    Panel,
    Query,
    line_panel,
    quantile_by,
    stat_panel,
    top_series,
)
from dashboards.panels import bar_gauge_panel as ranked

BY_NODE = "job, instance"
USED = "dioptase_cgroup_cpu_usage_seconds_total"
RECLAIMABLE = f"dioptase_reclaim_lent_cores{{{NODE_SELECTOR}}}"
REPORTED = f"dioptase_reclaim_advertised_cores{{{NODE_SELECTOR}}}"
CPUS = f"dioptase_node_cpus{{{NODE_SELECTOR}}}"
IN_USE = f"sum by ({BY_NODE}) (rate({USED}{{{RECLAIMED_SELECTOR}}}{RATE_INTERVAL}))"
ONLINE_OF_NODES = f'{NODE_SELECTOR},qos=~"shared_cores|dedicated_cores"'
APPLIED_CONFIG = f"dioptase_config_obeyed{{{NODE_SELECTOR}}}"
ON_LEADER = "and on (job, instance) dioptase_controller_leading == 1"
"""A replica that stands by shows what it knew when it led."""
ROLLOUT = "{{resource}} {{object}}"
INSTANCE = "{{instance}}"


def board() -> Board:
    return Board(
        "fleet",
        "Dioptase fleet",
        (
            "Reclaimable CPU and harm on all nodes, the nodes to look at first, pending and placed reclaimed pods, and the "
            "state of agents, controller and rollouts."
        ),
        (),
        (
            ("Summary", _glance()),
            ("Reclaimable CPU of the fleet", _reclaimable()),
            ("Nodes to look at first", _worst_nodes()),
            ("Scheduler", _scheduler()),
            ("Agents", _agents()),
            ("Evictions", _evicted()),
            ("Configuration", _configured()),
            ("Controller", _controller()),
        ),
    )


def interference_of_nodes() -> str:
    """Seconds a second that online pods of a node wait while reclaimed pods have the CPU."""
    return interference(BY_NODE, ONLINE_OF_NODES)


def _glance() -> list[Panel]:
    unwell = f"sum(dioptase_lifecycle_unwell_nodes {ON_LEADER}) or vector(0)"
    behind = f"count(dioptase_kcc_updated_nodes < dioptase_kcc_target_nodes {ON_LEADER}) or vector(0)"
    return [
        stat_panel(
            "Agents scraped",
            units.Short,
            f"count(dioptase_build_info{{{NODE_SELECTOR}}})",
            "Nodes whose agent answered the last scrape. If there are more nodes, see DioptaseAgentMissing.",
        ),
        stat_panel(
            "Nodes without a ready agent",
            units.Short,
            unwell,
            "As reported by the controller, which taints them after ten minutes.",
            (1,),
        ),
        stat_panel(
            "Reclaimable CPU", "cores", f"sum({RECLAIMABLE})", "CPU that reclaimed pods may use now, on all nodes."
        ),
        stat_panel(
            "Used share of reclaimable CPU",
            units.PercentUnit,
            f"sum({IN_USE}) / sum({RECLAIMABLE})",
            "A low share means that there is too little batch work.",
        ),
        stat_panel(
            "Online tasks waiting for reclaimed pods",
            "tasks",
            f"sum({interference_of_nodes()}) or vector(0)",
            "Mean number of online tasks, on all nodes, that wait while reclaimed pods have the CPU.",
        ),
        stat_panel(
            "Rollouts in progress",
            units.Short,
            behind,
            "Configurations whose newest version has not reached all of their nodes.",
            (1,),
        ),
    ]


def _reclaimable() -> list[Panel]:
    return [
        line_panel(
            "Reclaimable and used CPU and headroom of the fleet",
            "cores",
            (
                "Sum of all nodes. If the reclaimable CPU drops to 0 at once, look for a changed setting or a source that all "
                "nodes lack."
            ),
            Query(f"sum({REPORTED})", "promised"),
            Query(f"sum({RECLAIMABLE})", "lent"),
            Query(f"sum({IN_USE})", "used"),
            Query(f"sum({CPUS})", "CPUs"),
        ),
        line_panel(
            "Waits of online pods, all nodes",
            "tasks",
            "Mean number of online tasks that wait while reclaimed pods have the CPU: the harm of colocation.",
            Query(f"sum({interference_of_nodes()}) or vector(0)", "because of reclaimed pods"),
        ),
    ]


def _worst_nodes() -> list[Panel]:
    waits = f"max by ({BY_NODE}) ({quantile_by(0.99, 'dioptase_cgroup_runq_wait_seconds', ONLINE_OF_NODES)})"
    return [
        ranked(
            "Most harm to online pods",
            "tasks",
            "Nodes whose online pods wait most for reclaimed ones.",
            Query(top_series(interference_of_nodes()), INSTANCE),
        ),
        ranked(
            "Longest run-queue latency relative to the target",
            units.PercentUnit,
            (
                "p99 of the slowest online pod, relative to the target of its policy. Above 100 % the reclaimable CPU "
                "shrinks."
            ),
            Query(top_series(f"{waits} / on ({BY_NODE}) {LATENCY_TARGET}"), INSTANCE),
            (0.8, 1),
        ),
        ranked(
            "Least reclaimable CPU",
            units.PercentUnit,
            "The twelve nodes with the smallest reclaimable share of their CPUs.",
            Query(f"bottomk(12, {RECLAIMABLE} / on ({BY_NODE}) {CPUS})", INSTANCE),
        ),
        ranked(
            "Most unused reclaimable CPU",
            "cores",
            "Reclaimable CPU that reclaimed pods do not use.",
            Query(
                top_series(f"{RECLAIMABLE} - on ({BY_NODE}) ({IN_USE} or on ({BY_NODE}) 0 * {RECLAIMABLE})"), INSTANCE
            ),
        ),
    ]


def _scheduler() -> list[Panel]:
    """Without the scheduler extender (chart: `scheduler.enabled`) only the pods of each node have data."""
    binds = f'rate(dioptase_scheduler_requests_total{{verb="bind"}}{RATE_INTERVAL})'
    durations = f"rate(dioptase_scheduler_request_duration_seconds_bucket{RATE_INTERVAL})"
    failures = f'rate(dioptase_scheduler_requests_total{{verb!="bind",result!="done"}}{RATE_INTERVAL})'

    def pods(offset: str = "") -> str:
        """A sample for each reclaimed pod; a pod with several containers has several cgroups."""
        return f"count by ({BY_NODE}, namespace, pod) (dioptase_cgroup_threads{{{RECLAIMED_SELECTOR}}}{offset})"

    return [
        line_panel(
            "Pending pods by the plugin that rejects most nodes",
            units.Short,
            (
                "Pods that the scheduler extender rejected on every node. QoSAwareNodeResourcesFit: too few reclaimed "
                "resources. `kubectl dioptase top pending` lists the pods with their reasons."
            ),
            Query("sum by (plugin) (dioptase_scheduler_pending_pods_by_plugin)", "{{plugin}}"),
            stacked=True,
        ),
        line_panel(
            "Longest wait of a pending pod",
            units.Seconds,
            "Time since the first rejection of the pod that waits longest. If it grows, room appears for others only.",
            Query("max(dioptase_scheduler_oldest_pending_seconds)", "oldest"),
        ),
        line_panel(
            "Placements",
            "1/s",
            (
                "Pods bound a second, and requests that failed. bind: error while pods are bound is a conflict, which is tried "
                "again. Failures alone: read the log of kube-scheduler."
            ),
            Query(f"sum by (result) ({binds})", "bind: {{result}}"),
            Query(f"sum by (verb, result) ({failures})", "{{verb}}: {{result}}"),
        ),
        line_panel(
            "Duration of requests to the extender, p99",
            units.Seconds,
            "kube-scheduler waits for filter and prioritize of one pod before it takes the next one.",
            Query(f"histogram_quantile(0.99, sum by (verb, le) ({durations}))", "{{verb}}"),
        ),
        ranked(
            "Nodes with most reclaimed pods",
            units.Short,
            "Reclaimed pods that run now. All on few nodes: the others offer nothing, or do harm.",
            Query(top_series(f"count by ({BY_NODE}) ({pods()})"), INSTANCE),
        ),
        ranked(
            "Nodes with most new reclaimed pods",
            units.Short,
            "Reclaimed pods that run now and did not ten minutes ago.",
            Query(top_series(f"count by ({BY_NODE}) ({pods()} unless {pods(' offset 10m')})"), INSTANCE),
        ),
    ]


def _agents() -> list[Panel]:
    down = f'sum by ({BY_NODE}) (dioptase_source_up{{{NODE_SELECTOR},detail!="absent"}} == bool 0)'
    return [
        line_panel(
            "Versions",
            units.Short,
            "Agents by version. Two versions for long: the upgrade does not progress.",
            Query(f"count by (version) (dioptase_build_info{{{NODE_SELECTOR}}})", "{{version}}"),
            stacked=True,
        ),
        line_panel(
            "Modes",
            units.Short,
            "Agents by --act: on, dry-run, off.",
            Query(f"sum by (mode) (dioptase_act_mode{{{NODE_SELECTOR}}})", "{{mode}}"),
            stacked=True,
        ),
        line_panel(
            "Agents by state, as reported by the controller",
            units.Short,
            "Nodes by the state of their agent's pod. Without an agent, reclaimed pods are evicted after twenty minutes.",
            Query(f"sum by (agent, state) (dioptase_lifecycle_agents {ON_LEADER})", "{{agent}}: {{state}}"),
        ),
        ranked(
            "Failed sources, by node",
            units.Short,
            "Sources that agents cannot read. `kubectl dioptase doctor` names the remedies.",
            Query(top_series(down), INSTANCE),
            (1,),
        ),
        line_panel(
            "Oldest snapshots",
            units.Seconds,
            "Agents with the oldest latest cycle. Above three intervals the agent hangs.",
            Query(top_series(SNAPSHOT_AGE), INSTANCE),
        ),
    ]


def _evicted() -> list[Panel]:
    return [
        line_panel(
            "Evictions of all agents by reason",
            units.Short,
            "Evictions that were created, succeeded, failed, or exceeded the grace period.",
            Query(
                f"sum by (reason) (increase(dioptase_eviction_kills_total{{{NODE_SELECTOR}}}{RATE_INTERVAL}))",
                "{{reason}}",
            ),
            bars=True,
        ),
        ranked(
            "Nodes with most evictions",
            units.Short,
            "In the last hour. A single node points to that node, many nodes to a threshold.",
            Query(
                top_series(f"sum by ({BY_NODE}) (increase(dioptase_eviction_kills_total{{{NODE_SELECTOR}}}[1h]))"),
                INSTANCE,
            ),
        ),
        line_panel(
            "Evictions of nodes without an agent",
            units.Short,
            "Reclaimed pods on nodes without an agent that the controller evicted, by result.",
            Query(f"sum by (result) (increase(dioptase_lifecycle_evictions_total{RATE_INTERVAL}))", "{{result}}"),
            bars=True,
        ),
        line_panel(
            "Taints",
            units.Short,
            "Nodes tainted and untainted because of their agents.",
            Query(
                f"sum by (action, result) (increase(dioptase_lifecycle_taints_total{RATE_INTERVAL}))",
                "{{action}}: {{result}}",
            ),
            bars=True,
        ),
    ]


def _configured() -> list[Panel]:
    return [
        line_panel(
            "Nodes by configuration",
            units.Short,
            "Nodes by object and hash of its content. During a rollout one hash grows while another shrinks.",
            Query(f"count by (kind, object, hash) ({APPLIED_CONFIG} == 1)", "{{kind}} {{object}} {{hash}}"),
            stacked=True,
        ),
        line_panel(
            "Nodes that reject a configuration",
            units.Short,
            "They keep the last valid configuration. `kubectl dioptase config` shows the reason for each field.",
            Query(f"sum by (kind, object, hash) (1 - {APPLIED_CONFIG})", "{{kind}} {{object}} {{hash}}"),
        ),
        line_panel(
            "Progress of rollouts",
            units.Short,
            "Nodes that a configuration targets, those that its rollout has reached, and those that were updated.",
            Query(f"sum by (resource, object) (dioptase_kcc_target_nodes {ON_LEADER})", f"for: {ROLLOUT}"),
            Query(f"sum by (resource, object) (dioptase_kcc_canary_nodes {ON_LEADER})", f"reached: {ROLLOUT}"),
            Query(f"sum by (resource, object) (dioptase_kcc_updated_nodes {ON_LEADER})", f"updated: {ROLLOUT}"),
        ),
        line_panel(
            "Rejected configurations",
            units.Short,
            "While one is rejected, no object of its kind is rolled out.",
            Query(f"sum by (resource) (dioptase_kcc_invalid_objects {ON_LEADER})", "{{resource}}"),
        ),
    ]


def _controller() -> list[Panel]:
    return [
        line_panel(
            "Leader",
            units.Short,
            "1: one replica leads. 0: nothing is rolled out, tainted or evicted.",
            Query("dioptase_controller_leading", INSTANCE),
            stacked=True,
        ),
        line_panel(
            "Reconciliations",
            "1/s",
            (
                "Reconciliations by result. retried: the API server refused or did not answer. failed: a bug of the "
                "controller."
            ),
            Query(
                f"sum by (controller, result) (rate(dioptase_controller_reconciles_total{RATE_INTERVAL}))",
                "{{controller}}: {{result}}",
            ),
        ),
        line_panel(
            "Work queues",
            units.Short,
            "A queue that does not become empty: the API server refuses requests, or is slow.",
            Query(f"sum by (controller) (dioptase_controller_queue_length {ON_LEADER})", "{{controller}}"),
        ),
        line_panel(
            "Time since the last event of the API server",
            units.Seconds,
            "Time since the last event of each watched resource. At least once a minute is normal.",
            Query(f"max by (resource) (dioptase_controller_watch_age_seconds {ON_LEADER})", "{{resource}}"),
        ),
        line_panel(
            "Requests to the API server",
            "1/s",
            "By HTTP status. `unreachable`: no answer.",
            Query(f"sum by (status) (rate(dioptase_controller_api_requests_total{RATE_INTERVAL}))", "{{status}}"),
        ),
        line_panel(
            "Why nothing is tainted or evicted",
            units.Short,
            "1: the reason in force. none: no agent is healthy. full, partial: too many agents are unhealthy at once.",
            Query(f"max by (reason) (dioptase_lifecycle_halt {ON_LEADER})", "{{reason}}"),
        ),
    ]
