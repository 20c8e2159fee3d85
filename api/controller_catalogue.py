"""Every metric of the controller once, as api/catalogue.py has those of the node: metrics, documents and tests read it."""

from __future__ import annotations

from api.metric import Metric

CONTROLLER: tuple[Metric, ...] = (
    Metric("dioptase_controller_leading", "gauge", "", "1 where this replica leads and works, 0 where it stands by."),
    Metric("dioptase_controller_reconciles_total", "counter", "",
           "Times that a controller looked at something, by how that went: done, retried (the API server refused or was not "
           "there) or failed (a bug).", ("controller", "result")),
    Metric("dioptase_controller_queue_length", "gauge", "", "What waits to be looked at.", ("controller",)),
    Metric("dioptase_controller_api_requests_total", "counter", "",
           "Requests to the API server by HTTP status; unreachable where there was none.", ("method", "resource", "status")),
    Metric("dioptase_controller_watched_objects", "gauge", "", "Objects in memory.", ("resource",)),
    Metric("dioptase_controller_unreadable_objects", "gauge", "", "Objects that do not fit their type.", ("resource",)),
    Metric("dioptase_controller_watch_age_seconds", "gauge", "seconds",
           "Time since the API server was last heard of a resource; it says so once a minute at least.", ("resource",)),
    Metric("dioptase_controller_relists_total", "counter", "",
           "Lists that were needed because a watch could not go on.", ("resource",)),
    Metric("dioptase_kcc_target_nodes", "gauge", "", "Nodes that a configuration is for.", ("resource", "object")),
    Metric("dioptase_kcc_canary_nodes", "gauge", "", "Nodes of these that its rollout reaches as yet.", ("resource", "object")),
    Metric("dioptase_kcc_updated_nodes", "gauge", "", "Nodes of these that are told its newest content.",
           ("resource", "object")),
    Metric("dioptase_kcc_invalid_objects", "gauge", "",
           "Configurations that cannot stand; while there is one, nothing of its kind is rolled out.", ("resource",)),
    Metric("dioptase_kcc_node_updates_total", "counter", "", "Times that a node was told another configuration.",
           ("resource",)),
    Metric("dioptase_lifecycle_agents", "gauge", "", "Nodes by how their agent is: ready, not_ready or not_found.",
           ("agent", "state")),
    Metric("dioptase_lifecycle_unwell_nodes", "gauge", "", "Nodes of which an agent is not ready."),
    Metric("dioptase_lifecycle_halt", "gauge", "",
           "1 for why nothing is tainted or evicted: none, partial or full (too many nodes at once), stale (nothing heard).",
           ("reason",)),
    Metric("dioptase_lifecycle_taints_total", "counter", "",
           "Nodes that were to be tainted, untainted, or rid of what they promise to reclaimed pods (take-back): done, "
           "refused, dry-run.", ("action", "result")),
    Metric("dioptase_lifecycle_evictions_total", "counter", "",
           "Reclaimed pods of nodes without an agent that were asked to leave: evicted, gone, budget (a disruption budget "
           "keeps them), refused, dry-run.", ("result",)),
)  # fmt: skip
CONTROLLER_BY_NAME = {metric.name: metric for metric in CONTROLLER}
