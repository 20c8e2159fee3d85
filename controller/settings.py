"""Settings of the controllers.
Names in brackets are the corresponding flags of Katalyst's controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from api.text import quote
from controller.descheduler.descheduler_settings import DeschedulerSettings
from controller.kcc.targets import InvalidTarget, canary_cutoff
from controller.label_selectors import parse_selector
from controller.webhooks.webhook_settings import WebhookSettings

Seconds = Annotated[float, Meta(ge=0, le=86_400)]
DEFAULT_AGENT_SELECTORS = {"dioptase-agent": "app.kubernetes.io/name=dioptase,app.kubernetes.io/component=agent"}
Rate = Annotated[float, Meta(gt=0, le=1000)]
Leftover = Literal["reclaimed-resources", "eviction-taints"]
"""What agents write to Nodes if their settings say so."""


class _ControllerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    pass


class HealthConfig(_ControllerSettings, frozen=True, kw_only=True):
    """How nodes with unhealthy agents are treated. Names in brackets are flags of Katalyst's controller."""

    enabled: bool = True
    """[healthz-enabled] False disables watching agent pods, taints and evictions."""
    dry_run: bool = False
    """[healthz-dry-run] Evaluate, log and export metrics, but write nothing."""
    agents: Mapping[str, str] = msgspec.field(default_factory=lambda: dict(DEFAULT_AGENT_SELECTORS))
    """[healthz-agent-selector] Selector for the pods of each agent that a node must have, by name."""
    namespace: str = ""
    """Namespace of the agents' pods. Empty, as in Katalyst, means any; then every account that may create pods can create one
    that counts as a node's agent and hides that the agent is missing."""
    node_selector: str = ""
    """[healthz-node-selector] Nodes that must have the agents; empty means all."""
    taint_after_s: Seconds = 600.0
    """[healthz-unhealthy-period] Time without a ready agent after which a node receives no more reclaimed pods."""
    evict_after_s: Seconds = 1200.0
    """Time without a ready agent after which the node's reclaimed pods are evicted; at least `taintAfterS`."""
    taint_per_s: Rate = 0.2
    """[healthz-taint-qps] Nodes tainted per second."""
    evict_per_s: Rate = 0.1
    """[healthz-evict-qps] Nodes per second whose reclaimed pods are evicted."""
    disruption_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """[healthz-taint-threshold, healthz-evict-threshold] Share of nodes with unhealthy agents above which both stop."""

    def __post_init__(self) -> None:
        if self.evict_after_s < self.taint_after_s:
            raise ValueError(
                f"evictAfterS is {self.evict_after_s:g} and taintAfterS {self.taint_after_s:g}: pods evicted before the"
                " taint would come back; set evictAfterS to at least taintAfterS"
            )
        for name, selector in (
            *((f"agents.{name}", text) for name, text in self.agents.items()),
            ("nodeSelector", self.node_selector),
        ):
            try:
                if not parse_selector(selector).requirements and name != "nodeSelector":
                    raise ValueError("it is empty and would match every pod; name the labels of the agent")
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


class RolloutConfig(_ControllerSettings, frozen=True, kw_only=True):
    """Rollout of configuration objects that name no canary themselves."""

    canary: int | str = "10%"
    """Number or percentage of the nodes that get new content first, at least one. `100%` updates all nodes at once."""
    soak_s: Seconds = 120.0
    """Time for which the canaries are observed before the other nodes get the content."""

    def __post_init__(self) -> None:
        try:
            canary_cutoff(self.canary, 0)
        except InvalidTarget:
            raise ValueError(f"canary: {quote(self.canary, 40)} is invalid; write 3 or 10%") from None


class EvictionBudgetConfig(_ControllerSettings, frozen=True, kw_only=True):
    """The budget of evictions by all agents, which they count in a Lease."""

    lease: str = "dioptase-evictions"
    """Name of the Lease, in the namespace of the controller; the agents' setting `eviction.budgetLease` names it."""
    per_minute: Annotated[int, Meta(ge=0, le=100_000)] = 10
    """Minimum number of evictions per minute."""
    node_share: Annotated[float, Meta(ge=0, le=1)] = 0.05
    """Evictions per minute as a share of the nodes, if that is more."""


class ControllerConfig(_ControllerSettings, frozen=True, kw_only=True):
    """Content of the settings file."""

    controllers: tuple[Literal["kcc", "lifecycle", "overcommit", "descheduler"], ...] = ("kcc", "lifecycle")
    """Enabled controllers."""
    lease: str = "dioptase-controller"
    """Name of the Lease for leader election among replicas, in the namespace of the controller."""
    leftovers: tuple[Leftover, ...] = ()
    """What agents no longer write, so that the controller removes it from the nodes of `health.nodeSelector`. The controller
    removes only taints that an agent recorded in an annotation of its Node."""
    token_review: bool = False
    """Serve metrics only to clients whose bearer token the API server allows to get `/metrics`."""
    health: HealthConfig = HealthConfig()
    rollout: RolloutConfig = RolloutConfig()
    eviction_budget: EvictionBudgetConfig = EvictionBudgetConfig()
    webhooks: WebhookSettings = WebhookSettings()
    descheduler: DeschedulerSettings = DeschedulerSettings()
