"""All nodes as one: what they lend and at whose cost, which fare worst, how agents, controller and rollouts are."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.colocation import harm
from dashboards.health import AGE
from dashboards.panels import NODE, RATE, RECLAIMED, TARGET, Board, Panel, Query, lines, most, number, quantile
from dashboards.panels import ranking as ranked

BY_NODE = "job, instance"
USED = "dioptase_cgroup_cpu_usage_seconds_total"
LENT = f"dioptase_reclaim_lent_cores{{{NODE}}}"
PROMISED = f"dioptase_reclaim_advertised_cores{{{NODE}}}"
CPUS = f"dioptase_node_cpus{{{NODE}}}"
IN_USE = f"sum by ({BY_NODE}) (rate({USED}{{{RECLAIMED}}}{RATE}))"
ONLINE = f'{NODE},qos=~"shared_cores|dedicated_cores"'
OBEYED = f"dioptase_config_obeyed{{{NODE}}}"
LEADING = "and on (job, instance) dioptase_controller_leading == 1"
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
            ("What the fleet lends", _lends()),
            ("Nodes that fare worst", _worst()),
            ("Agents", _agents()),
            ("Who had to leave", _evicted()),
            ("Configuration", _configured()),
            ("Controller", _controls()),
        ),
    )


def harm_of_nodes() -> str:
    """Seconds a second that online pods of a node wait while reclaimed pods have the CPU."""
    return harm(BY_NODE, ONLINE)


def _glance() -> list[Panel]:
    unwell = f"sum(dioptase_lifecycle_unwell_nodes {LEADING}) or vector(0)"
    behind = f"count(dioptase_kcc_updated_nodes < dioptase_kcc_target_nodes {LEADING}) or vector(0)"
    return [
        number(
            "Agents that answer",
            units.Short,
            f"count(dioptase_build_info{{{NODE}}})",
            "Nodes whose agent Prometheus has just scraped. Fewer than there are nodes: see DioptaseAgentMissing.",
        ),
        number(
            "Nodes without a ready agent",
            units.Short,
            unwell,
            "As the controller sees it; after ten minutes it taints them.",
            (1,),
        ),
        number("Lent by all", "cores", f"sum({LENT})", "What reclaimed pods may use now, of all nodes."),
        number(
            "Used of what is lent",
            units.PercentUnit,
            f"sum({IN_USE}) / sum({LENT})",
            "Little of much: there is too little batch work.",
        ),
        number(
            "Waits that it costs",
            "tasks",
            f"sum({harm_of_nodes()}) or vector(0)",
            "Mean number of online tasks, of all nodes, that wait while reclaimed pods have the CPU.",
        ),
        number(
            "Rollouts under way",
            units.Short,
            behind,
            "Configurations whose newest content has not reached all of its nodes.",
            (1,),
        ),
    ]


def _lends() -> list[Panel]:
    return [
        lines(
            "Lent, used and promised by the fleet",
            "cores",
            "The sum of all nodes. Lent that falls to nothing at once is a setting or a source that all of them miss.",
            Query(f"sum({PROMISED})", "promised"),
            Query(f"sum({LENT})", "lent"),
            Query(f"sum({IN_USE})", "used"),
            Query(f"sum({CPUS})", "CPUs"),
        ),
        lines(
            "Waits of online pods, all nodes",
            "tasks",
            "Mean number of online tasks that wait while reclaimed pods have the CPU: the price of what is lent.",
            Query(f"sum({harm_of_nodes()}) or vector(0)", "because of reclaimed pods"),
        ),
    ]


def _worst() -> list[Panel]:
    waits = f"max by ({BY_NODE}) ({quantile(0.99, 'dioptase_cgroup_runq_wait_seconds', ONLINE)})"
    return [
        ranked(
            "Most harm", "tasks", "Where reclaimed pods cost online ones most.", Query(most(harm_of_nodes()), INSTANCE)
        ),
        ranked(
            "Longest waits beside the target",
            units.PercentUnit,
            "p99 of the online pod that waits longest, as a share of its policy's target; above it lending shrinks.",
            Query(most(f"{waits} / on ({BY_NODE}) {TARGET}"), INSTANCE),
            (0.8, 1),
        ),
        ranked(
            "Least lent",
            units.PercentUnit,
            "The twelve nodes that lend the smallest share of their CPUs.",
            Query(f"bottomk(12, {LENT} / on ({BY_NODE}) {CPUS})", INSTANCE),
        ),
        ranked(
            "Most lent and unused",
            "cores",
            "Room for more batch work.",
            Query(most(f"{LENT} - on ({BY_NODE}) ({IN_USE} or on ({BY_NODE}) 0 * {LENT})"), INSTANCE),
        ),
    ]


def _agents() -> list[Panel]:
    down = f'sum by ({BY_NODE}) (dioptase_source_up{{{NODE},detail!="absent"}} == bool 0)'
    return [
        lines(
            "Versions",
            units.Short,
            "Agents of each version; two for long is an upgrade that got stuck.",
            Query(f"count by (version) (dioptase_build_info{{{NODE}}})", "{{version}}"),
            stacked=True,
        ),
        lines(
            "Modes",
            units.Short,
            "Agents that act, that only say what they would do, and that decide nothing.",
            Query(f"sum by (mode) (dioptase_act_mode{{{NODE}}})", "{{mode}}"),
            stacked=True,
        ),
        lines(
            "Agents as the controller sees them",
            units.Short,
            "Nodes by how their agent's pod is. Of one without, reclaimed pods have to leave after twenty minutes.",
            Query(f"sum by (agent, state) (dioptase_lifecycle_agents {LEADING})", "{{agent}}: {{state}}"),
        ),
        ranked(
            "Sources down, by node",
            units.Short,
            "What agents cannot read; `kubectl dioptase doctor` tells what helps.",
            Query(most(down), INSTANCE),
            (1,),
        ),
        lines(
            "Oldest snapshots",
            units.Seconds,
            "Agents whose latest look at their node is oldest; above three intervals one hangs.",
            Query(most(AGE), INSTANCE),
        ),
    ]


def _evicted() -> list[Panel]:
    return [
        lines(
            "Evictions of all agents by reason",
            units.Short,
            "What became of pods that agents had leave: created, succeeded, failed, or late.",
            Query(f"sum by (reason) (increase(dioptase_eviction_kills_total{{{NODE}}}{RATE}))", "{{reason}}"),
            bars=True,
        ),
        ranked(
            "Nodes that evict most",
            units.Short,
            "In the last hour. One node alone is a matter of that node, many are a matter of a threshold.",
            Query(most(f"sum by ({BY_NODE}) (increase(dioptase_eviction_kills_total{{{NODE}}}[1h]))"), INSTANCE),
        ),
        lines(
            "Evictions of nodes without an agent",
            units.Short,
            "By the controller: what became of reclaimed pods whose node nobody looks after.",
            Query(f"sum by (result) (increase(dioptase_lifecycle_evictions_total{RATE}))", "{{result}}"),
            bars=True,
        ),
        lines(
            "Taints",
            units.Short,
            "Nodes tainted and untainted because of their agents.",
            Query(
                f"sum by (action, result) (increase(dioptase_lifecycle_taints_total{RATE}))", "{{action}}: {{result}}"
            ),
            bars=True,
        ),
    ]


def _configured() -> list[Panel]:
    return [
        lines(
            "Nodes by configuration",
            units.Short,
            "How many nodes obey which content of each object: a rollout is one hash that grows while another shrinks.",
            Query(f"count by (kind, object, hash) ({OBEYED} == 1)", "{{kind}} {{object}} {{hash}}"),
            stacked=True,
        ),
        lines(
            "Nodes that cannot obey",
            units.Short,
            "Their last good configuration stands. `kubectl dioptase config` says why, field by field.",
            Query(f"sum by (kind, object, hash) (1 - {OBEYED})", "{{kind}} {{object}} {{hash}}"),
        ),
        lines(
            "Progress of rollouts",
            units.Short,
            "Nodes that a configuration is for, those that its rollout reaches as yet, and those that were told.",
            Query(f"sum by (resource, object) (dioptase_kcc_target_nodes {LEADING})", f"for: {ROLLOUT}"),
            Query(f"sum by (resource, object) (dioptase_kcc_canary_nodes {LEADING})", f"reached: {ROLLOUT}"),
            Query(f"sum by (resource, object) (dioptase_kcc_updated_nodes {LEADING})", f"told: {ROLLOUT}"),
        ),
        lines(
            "Configurations that cannot stand",
            units.Short,
            "While there is one, nothing of its kind is rolled out.",
            Query(f"sum by (resource) (dioptase_kcc_invalid_objects {LEADING})", "{{resource}}"),
        ),
    ]


def _controls() -> list[Panel]:
    return [
        lines(
            "Who leads",
            units.Short,
            "One replica leads and works; at two the sum would be wrong, at none nothing is rolled out, tainted or evicted.",
            Query("dioptase_controller_leading", INSTANCE),
            stacked=True,
        ),
        lines(
            "What it does",
            "1/s",
            "Times that something was looked at; retried is the API server's doing, failed is a bug.",
            Query(
                f"sum by (controller, result) (rate(dioptase_controller_reconciles_total{RATE}))",
                "{{controller}}: {{result}}",
            ),
        ),
        lines(
            "What waits",
            units.Short,
            "A queue that does not empty: the API server refuses, or is slow.",
            Query(f"sum by (controller) (dioptase_controller_queue_length {LEADING})", "{{controller}}"),
        ),
        lines(
            "Silence of the API server",
            units.Seconds,
            "Time since it was last heard of each resource; it says something once a minute at least.",
            Query(f"max by (resource) (dioptase_controller_watch_age_seconds {LEADING})", "{{resource}}"),
        ),
        lines(
            "Requests to the API server",
            "1/s",
            "By answer; unreachable where there was none.",
            Query(f"sum by (status) (rate(dioptase_controller_api_requests_total{RATE}))", "{{status}}"),
        ),
        lines(
            "Why it holds back",
            units.Short,
            "1 for why nothing is tainted or evicted: none is well; full and partial: too many nodes are unwell at once.",
            Query(f"max by (reason) (dioptase_lifecycle_halt {LEADING})", "{{reason}}"),
        ),
    ]
