"""Settings of the controllers, and their parser.
Names in brackets are flags of Katalyst's controller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from controller.label_selectors import parse_selector

Seconds = Annotated[float, Meta(ge=0, le=86_400)]
DEFAULT_AGENT_SELECTORS = {"dioptase-agent": "app.kubernetes.io/name=dioptase,app.kubernetes.io/component=agent"}
Rate = Annotated[float, Meta(gt=0, le=1000)]


class _ControllerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    pass


class HealthConfig(_ControllerSettings, frozen=True, kw_only=True):
    """What becomes of nodes whose agents are not well. Names in brackets are flags of Katalyst's controller."""

    enabled: bool = True
    """[healthz-enabled] False watches no pods, taints and evicts nothing."""
    dry_run: bool = False
    """[healthz-dry-run] Judge and tell in the log and in metrics, and write nothing."""
    agents: Mapping[str, str] = msgspec.field(default_factory=lambda: dict(DEFAULT_AGENT_SELECTORS))
    """[healthz-agent-selector] By name, a selector for the pods of each agent that a node must have."""
    namespace: str = ""
    """That of their pods; empty, as in Katalyst: any, where everybody who may make pods can make one that is taken for a node's
    agent, and hide that the agent is gone."""
    node_selector: str = ""
    """[healthz-node-selector] Nodes that must have them; empty: all."""
    taint_after_s: Seconds = 600.0
    """[healthz-unhealthy-period] A node whose agent has not been ready for so long gets no more reclaimed pods."""
    evict_after_s: Seconds = 1200.0
    """After so long, those that run there are evicted. Not before they are kept away: at least `taintAfterS`."""
    taint_per_s: Rate = 0.2
    """[healthz-taint-qps] Nodes that are tainted in a second."""
    evict_per_s: Rate = 0.1
    """[healthz-evict-qps] Nodes that are emptied in a second."""
    disruption_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """[healthz-taint-threshold, healthz-evict-threshold] Part of the nodes beyond which unwell agents stop both."""

    def __post_init__(self) -> None:
        if self.evict_after_s < self.taint_after_s:
            raise ValueError(
                f"evictAfterS is {self.evict_after_s:g} and taintAfterS {self.taint_after_s:g}: pods that leave before new ones"
                " are kept away come back; give evictAfterS at least as much"
            )
        for name, selector in (
            *((f"agents.{name}", text) for name, text in self.agents.items()),
            ("nodeSelector", self.node_selector),
        ):
            try:
                if not parse_selector(selector).requirements and name != "nodeSelector":
                    raise ValueError("it is empty and would take any pod for the agent; name its labels")
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


class ControllerConfig(_ControllerSettings, frozen=True, kw_only=True):
    """The file as a whole."""

    controllers: tuple[Literal["kcc", "lifecycle"], ...] = ("kcc", "lifecycle")
    """Those that run."""
    lease: str = "dioptase-controller"
    """Name of the Lease by which one of several replicas leads; it is in the namespace that the controller runs in."""
    token_review: bool = False
    """Serve metrics to those alone whose bearer token the API server knows and allows to get `/metrics`."""
    health: HealthConfig = HealthConfig()


ErrorDescriber = Callable[[msgspec.ValidationError, object, type[ControllerConfig]], str]


def parse_settings(text: str, check: Callable[[str], None], complaint: ErrorDescriber) -> ControllerConfig:
    """`check` raises ValueError where the text is not one plain YAML document, `complaint` words what does not fit. Raises
    ValueError with the field and the remedy."""
    check(text)
    document = msgspec.yaml.decode(text)
    try:
        return msgspec.convert({} if document is None else document, ControllerConfig)
    except msgspec.ValidationError as error:
        raise ValueError(complaint(error, document, ControllerConfig)) from None
