"""The fleet dashboard: reclaimable resources and interference of all nodes, agents, controller and rollouts."""

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
        "What all nodes lend and at whose cost, which of them fare worst, and how agents, controller and rollouts are.",
        (),
        (
            ("At a glance", _glance()),
            ("What the fleet lends", _reclaimable()),
            ("Nodes that fare worst", _worst_nodes()),
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
            "Agents that answer",
            units.Short,
            f"count(dioptase_build_info{{{NODE_SELECTOR}}})",
            "Nodes whose agent Prometheus has just scraped. Fewer than there are nodes: see DioptaseAgentMissing.",
        ),
        stat_panel(
            "Nodes without a ready agent",
            units.Short,
            unwell,
            "As the controller sees it; after ten minutes it taints them.",
            (1,),
        ),
        stat_panel("Lent by all", "cores", f"sum({RECLAIMABLE})", "What reclaimed pods may use now, of all nodes."),
        stat_panel(
            "Used of what is lent",
            units.PercentUnit,
            f"sum({IN_USE}) / sum({RECLAIMABLE})",
            "Little of much: there is too little batch work.",
        ),
        stat_panel(
            "Waits that it costs",
            "tasks",
            f"sum({interference_of_nodes()}) or vector(0)",
            "Mean number of online tasks, of all nodes, that wait while reclaimed pods have the CPU.",
        ),
        stat_panel(
            "Rollouts under way",
            units.Short,
            behind,
            "Configurations whose newest content has not reached all of its nodes.",
            (1,),
        ),
    ]


def _reclaimable() -> list[Panel]:
    return [
        line_panel(
            "Reclaimable and used CPU and headroom of the fleet",
            "cores",
            "The sum of all nodes. Lent that falls to nothing at once is a setting or a source that all of them miss.",
            Query(f"sum({REPORTED})", "promised"),
            Query(f"sum({RECLAIMABLE})", "lent"),
            Query(f"sum({IN_USE})", "used"),
            Query(f"sum({CPUS})", "CPUs"),
        ),
        line_panel(
            "Waits of online pods, all nodes",
            "tasks",
            "Mean number of online tasks that wait while reclaimed pods have the CPU: the price of what is lent.",
            Query(f"sum({interference_of_nodes()}) or vector(0)", "because of reclaimed pods"),
        ),
    ]


def _worst_nodes() -> list[Panel]:
    waits = f"max by ({BY_NODE}) ({quantile_by(0.99, 'dioptase_cgroup_runq_wait_seconds', ONLINE_OF_NODES)})"
    return [
        ranked(
            "Most harm",
            "tasks",
            "Where reclaimed pods cost online ones most.",
            Query(top_series(interference_of_nodes()), INSTANCE),
        ),
        ranked(
            "Longest waits relative to the target",
            units.PercentUnit,
            "p99 of the online pod that waits longest, as a share of its policy's target; above it lending shrinks.",
            Query(top_series(f"{waits} / on ({BY_NODE}) {LATENCY_TARGET}"), INSTANCE),
            (0.8, 1),
        ),
        ranked(
            "Least lent",
            units.PercentUnit,
            "The twelve nodes that lend the smallest share of their CPUs.",
            Query(f"bottomk(12, {RECLAIMABLE} / on ({BY_NODE}) {CPUS})", INSTANCE),
        ),
        ranked(
            "Most lent and unused",
            "cores",
            "Room for more batch work.",
            Query(
                top_series(f"{RECLAIMABLE} - on ({BY_NODE}) ({IN_USE} or on ({BY_NODE}) 0 * {RECLAIMABLE})"), INSTANCE
            ),
        ),
    ]


def _agents() -> list[Panel]:
    down = f'sum by ({BY_NODE}) (dioptase_source_up{{{NODE_SELECTOR},detail!="absent"}} == bool 0)'
    return [
        line_panel(
            "Versions",
            units.Short,
            "Agents of each version; two for long is an upgrade that got stuck.",
            Query(f"count by (version) (dioptase_build_info{{{NODE_SELECTOR}}})", "{{version}}"),
            stacked=True,
        ),
        line_panel(
            "Modes",
            units.Short,
            "Agents that act, that only say what they would do, and that decide nothing.",
            Query(f"sum by (mode) (dioptase_act_mode{{{NODE_SELECTOR}}})", "{{mode}}"),
            stacked=True,
        ),
        line_panel(
            "Agents as the controller sees them",
            units.Short,
            "Nodes by how their agent's pod is. Of one without, reclaimed pods have to leave after twenty minutes.",
            Query(f"sum by (agent, state) (dioptase_lifecycle_agents {ON_LEADER})", "{{agent}}: {{state}}"),
        ),
        ranked(
            "Sources down, by node",
            units.Short,
            "What agents cannot read; `kubectl dioptase doctor` tells what helps.",
            Query(top_series(down), INSTANCE),
            (1,),
        ),
        line_panel(
            "Oldest snapshots",
            units.Seconds,
            "Agents whose latest look at their node is oldest; above three intervals one hangs.",
            Query(top_series(SNAPSHOT_AGE), INSTANCE),
        ),
    ]


def _evicted() -> list[Panel]:
    return [
        line_panel(
            "Evictions of all agents by reason",
            units.Short,
            "What became of pods that agents had leave: created, succeeded, failed, or late.",
            Query(
                f"sum by (reason) (increase(dioptase_eviction_kills_total{{{NODE_SELECTOR}}}{RATE_INTERVAL}))",
                "{{reason}}",
            ),
            bars=True,
        ),
        ranked(
            "Nodes that evict most",
            units.Short,
            "In the last hour. One node alone is a matter of that node, many are a matter of a threshold.",
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
            "How many nodes apply which content of each object: a rollout is one hash that grows while another shrinks.",
            Query(f"count by (kind, object, hash) ({APPLIED_CONFIG} == 1)", "{{kind}} {{object}} {{hash}}"),
            stacked=True,
        ),
        line_panel(
            "Nodes that cannot apply it",
            units.Short,
            "Their last good configuration stands. `kubectl dioptase config` says why, field by field.",
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
            "Configurations that cannot stand",
            units.Short,
            "While there is one, nothing of its kind is rolled out.",
            Query(f"sum by (resource) (dioptase_kcc_invalid_objects {ON_LEADER})", "{{resource}}"),
        ),
    ]


def _controller() -> list[Panel]:
    return [
        line_panel(
            "Leader",
            units.Short,
            "One replica leads and works; at two the sum would be wrong, at none nothing is rolled out, tainted or evicted.",
            Query("dioptase_controller_leading", INSTANCE),
            stacked=True,
        ),
        line_panel(
            "What it does",
            "1/s",
            "Times that something was looked at; retried is the API server's doing, failed is a bug.",
            Query(
                f"sum by (controller, result) (rate(dioptase_controller_reconciles_total{RATE_INTERVAL}))",
                "{{controller}}: {{result}}",
            ),
        ),
        line_panel(
            "What waits",
            units.Short,
            "A queue that does not empty: the API server refuses, or is slow.",
            Query(f"sum by (controller) (dioptase_controller_queue_length {ON_LEADER})", "{{controller}}"),
        ),
        line_panel(
            "Silence of the API server",
            units.Seconds,
            "Time since it was last heard of each resource; it says something once a minute at least.",
            Query(f"max by (resource) (dioptase_controller_watch_age_seconds {ON_LEADER})", "{{resource}}"),
        ),
        line_panel(
            "Requests to the API server",
            "1/s",
            "By answer; unreachable where there was none.",
            Query(f"sum by (status) (rate(dioptase_controller_api_requests_total{RATE_INTERVAL}))", "{{status}}"),
        ),
        line_panel(
            "Why it holds back",
            units.Short,
            "1 for why nothing is tainted or evicted: none is well; full and partial: too many nodes are unwell at once.",
            Query(f"max by (reason) (dioptase_lifecycle_halt {ON_LEADER})", "{{reason}}"),
        ),
    ]
