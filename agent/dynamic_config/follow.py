"""Follows the node's CustomNodeConfig and applies the objects it names to the running agent.
The controller decides which objects a node applies, canary rollouts included; each is fetched by name when its hash
changes. While the API server is unreachable, the configuration applied last stays in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from agent.config.config import AgentConfig
from agent.config.loader import NodeCheck, SettingDocuments
from agent.dynamic_config.last_good import LastGoodFile
from agent.dynamic_config.merge import ConfigObject, ResolvedConfig, resolve_config
from agent.dynamic_config.translate import CONFIG_KINDS, GROUP, VERSION
from api.interfaces import Unavailable
from api.katalyst.kcc import CustomNodeConfig, TargetConfig
from common.backoff import Backoff
from kube.client import KubeClient, ListScope
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer
from kube.objects import ResourceType, UnstructuredObject

if TYPE_CHECKING:
    from api.diagnostics import EffectiveConfiguration

log = logging.getLogger(__name__)
CNC_RESOURCE = ResourceType(GROUP, VERSION, "customnodeconfigs", "CustomNodeConfig", CustomNodeConfig)
FETCH_BACKOFF = Backoff(first_s=1.0, max_s=60.0)
CHECK_INTERVAL_S = 3.0
"""Time between checks of whether the watch is alive and its object still exists."""
RETENTION_S = 2 * 3600.0
"""How long a node without a CustomNodeConfig retains the last configuration."""
STARTUP_GRACE_S = 10.0
"""For this time after start, a missing first event is no problem."""
WATCH_STALE_S = 600.0
"""A watch is renewed within eight minutes: one that is silent for longer is broken."""
_STAYS = "the last good configuration stays in force"


class DynamicConfig:
    """The effective configuration: the settings file with the cluster's objects on top."""

    def __init__(
        self, documents: SettingDocuments, config: AgentConfig, check_node: NodeCheck, saved: LastGoodFile | None
    ) -> None:
        """`documents` are the settings of the node by source, `config` is all of them. Raises Unavailable if a damaged
        last-good file cannot be moved aside."""
        self._documents, self._file, self._check_node, self._saved = documents, config, check_node, saved
        self._started_wall_ns = time.time_ns()
        self.desired: Mapping[str, ConfigObject] = {} if saved is None else saved.load()
        self.resolved: ResolvedConfig = resolve_config(config, self.desired, self.desired, check_node)
        self.messages = () if saved is None else saved.messages
        self.save_error: Unavailable | None = None

    @property
    def config(self) -> AgentConfig:
        return self.resolved.config

    def change(self, desired: Mapping[str, ConfigObject]) -> None:
        """Apply these objects and no others."""
        before = self.resolved
        self.desired = desired
        self.resolved = after = resolve_config(self._file, before.applied, desired, self._check_node)
        for resource, problem in after.problems.items():
            if before.problems.get(resource) != problem:
                result = "its last good version stays in force" if resource in after.applied else "it is not applied"
                log.error("%s %s: %s; %s", CONFIG_KINDS[resource].kind, desired[resource].key, problem, result)
        for resource, applied in after.applied.items():
            if not applied.same(before.applied.get(resource)):
                log.info("applied %s %s (%s)", CONFIG_KINDS[resource].kind, applied.key, applied.hash)
                for unused in after.unused.get(resource, ()):
                    log.warning("%s %s: %s", CONFIG_KINDS[resource].kind, applied.key, unused)
        for resource in before.applied.keys() - after.applied.keys():
            log.info("stopped applying %s %s", CONFIG_KINDS[resource].kind, before.applied[resource].key)

    def save(self) -> None:
        """Write the applied objects to disk. Never raises: `save_error` is why it failed."""
        if self._saved is None:
            return
        try:
            self._saved.save(self.resolved.applied)
            self.save_error = None
        except Unavailable as error:
            self.save_error = error

    def object_states(self) -> Mapping[tuple[str, ...], bool]:
        """Return by kind, key and hash whether an object is applied (True) or was rejected (False). Any thread may call it."""
        rejected = {_object_labels(each): False for each in self.desired.values()}
        return rejected | {_object_labels(each): True for each in self.resolved.applied.values()}

    def effective(self) -> EffectiveConfiguration:
        """Return every setting with its source."""
        from agent.dynamic_config.effective import effective_configuration  # noqa: PLC0415 - rarely requested

        return effective_configuration(self.resolved, self._documents, self._started_wall_ns, self.desired)


def _object_labels(each: ConfigObject) -> tuple[str, ...]:
    return (CONFIG_KINDS[each.resource].kind, each.key, each.hash)


def has_other_content(fetched: UnstructuredObject, content: str) -> bool:
    """Return whether an object's content has another hash than this one, according to its status.

    Then the new content is still rolled out to other nodes, or is invalid, and this node must not apply it yet. Without a
    status written by the controller, return False.
    """
    status, generation = fetched.status, fetched.metadata.generation
    if not status.get("currentHash"):
        return False
    conditions = status.get("conditions") or ()
    invalid = any(
        isinstance(each, Mapping) and (each.get("type"), each.get("status")) == ("Valid", "False")
        for each in conditions
    )
    outdated = status.get("observedGeneration") and status["observedGeneration"] != generation
    return bool(status["currentHash"] != content or outdated or invalid)


def describe_stale_watch(informer: Informer[Any], started_s: float) -> str:
    """Return when the object of a watch was received; empty while that is recent. `started_s` is CLOCK_MONOTONIC."""
    now_s = time.monotonic()
    age_s = informer.age_s(now_s)
    if age_s is None:
        return "never received" if now_s - started_s > STARTUP_GRACE_S else ""
    return f"last received {age_s:.0f} s ago" if age_s > WATCH_STALE_S else ""


class CustomNodeConfigFollower:
    """Follows one node's CustomNodeConfig; also a HealthReporter."""

    name, form = "dynamic-config", "watch"
    lost_events = None

    def __init__(self, client: KubeClient, node: str, dynamic: DynamicConfig) -> None:
        self._client, self._node, self._dynamic = client, node, dynamic
        self._informer = Informer(client, CNC_RESOURCE, ListScope(fields=f"metadata.name={node}"))
        self._wake = asyncio.Event()
        self._informer.listen(lambda _: self._wake.set())
        self._failures, self._not_before_s = 0, 0.0
        self._failure = ""
        self._missing_since_s: float | None = None
        self._started_s = time.monotonic()
        self._ignored: frozenset[str] = frozenset()

    async def run(self, apply_config: Callable[[AgentConfig], None]) -> None:
        """Call `apply_config` with every new configuration, until cancelled. Nothing that the API server does ends it."""
        watching = asyncio.create_task(self._informer.run())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), CHECK_INTERVAL_S)
                if watching.done():
                    watching.result()  # only a bug ends it; raise it here
                if await self.check_once():
                    apply_config(self._dynamic.config)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def effective(self) -> EffectiveConfiguration:
        """Return every setting with its source, and the follower's problem."""
        problem = self.problem()
        return msgspec.structs.replace(
            self._dynamic.effective(), node=self._node, problem="" if problem is None else problem.reason
        )

    def problem(self) -> Unavailable | None:
        """Return why the desired configuration is not applied, the most serious reason first."""
        for resource, problem in self._dynamic.resolved.problems.items():
            key = self._dynamic.desired[resource].key if resource in self._dynamic.desired else ""
            return Unavailable(
                f"{CONFIG_KINDS[resource].kind} {key}: {problem}", "correct it: until then its last good version stays"
            )
        if self._failure:
            return Unavailable(self._failure, f"{_STAYS}; the agent retries")
        if received := describe_stale_watch(self._informer, self._started_s):
            return Unavailable(
                f"CustomNodeConfig {self._node} was {received}",
                f"{_STAYS}; check that the API server is reachable and the agent's role allows watch",
            )
        return self._dynamic.save_error

    async def check_once(self) -> bool:
        """Compare the CustomNodeConfig with the applied objects; return whether the configuration changed."""
        self._wake.clear()
        if not self._informer.synced.is_set() or time.monotonic() < self._not_before_s:
            return False
        cnc = self._informer.store.get(self._node)
        if cnc is None:
            return await self._handle_missing()
        self._missing_since_s = None
        targets = () if cnc.status is None else cnc.status.katalyst_custom_config_list or ()
        desired, self._failure = await self._fetch_all(self._targets_by_resource(targets))
        self._failures = self._failures + 1 if self._failure else 0
        self._not_before_s = time.monotonic() + FETCH_BACKOFF.wait_s(self._failures, random.random())
        return await self._change(desired)

    async def _handle_missing(self) -> bool:
        """Without a (valid) CustomNodeConfig, retain the configuration for a while, then drop it."""
        now_s = time.monotonic()
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        self._failure = ""
        if self._dynamic.resolved.applied and now_s - self._missing_since_s < RETENTION_S:
            problem = self._informer.problems.get(self._node, "")
            name = f"CustomNodeConfig {self._node}"
            self._failure = f"{name}: {problem}" if problem else f"there is no {name}"
            return False
        return await self._change({})

    def _targets_by_resource(self, targets: tuple[TargetConfig, ...]) -> dict[str, TargetConfig]:
        """Return the targets of known kinds by resource; log each unknown kind once."""
        named: dict[str, TargetConfig] = {}
        unknown = set()
        for target in targets:
            kind = target.config_type
            if kind.group != GROUP or kind.version != VERSION or kind.resource not in CONFIG_KINDS:
                unknown.add(f"{kind.resource:.80}.{kind.version:.20}.{kind.group:.80}")
            else:
                named.setdefault(kind.resource, target)
        for name in sorted(unknown - self._ignored):
            log.warning("ignored %s in CustomNodeConfig %s: the kind is unknown", name, self._node)
        self._ignored = frozenset(unknown)
        return named

    async def _fetch_all(self, targets: Mapping[str, TargetConfig]) -> tuple[dict[str, ConfigObject], str]:
        """Return the objects, unchanged ones included, and what could not be fetched."""
        desired: dict[str, ConfigObject] = {}
        failure = ""
        for resource, target in targets.items():
            key = f"{target.config_namespace}/{target.config_name}" if target.config_namespace else target.config_name
            previous = self._dynamic.desired.get(resource)
            if previous is not None and (previous.key, previous.hash) == (key, target.hash):
                desired[resource] = previous
                continue
            try:
                desired[resource] = await self._fetch(resource, key, target.hash)
            except (ApiError, ApiUnreachable, ValueError) as error:
                failure = f"{CONFIG_KINDS[resource].kind} {key:.300} cannot be fetched: {error}"
                log.warning("%s", failure)
                if previous is not None:
                    desired[resource] = previous
        return desired, failure

    async def _fetch(self, resource: str, key: str, content: str) -> ConfigObject:
        kind = CONFIG_KINDS[resource]
        body: dict[str, Any] = {}
        if not kind.all_unused:  # AuthConfiguration holds passwords, which must not get into memory or onto disk
            kube_kind = ResourceType(GROUP, VERSION, resource, kind.kind, UnstructuredObject, namespaced="/" in key)
            fetched = await self._client.get(kube_kind, key)
            if has_other_content(fetched, content):
                raise ValueError(f"its content no longer has the hash {content:.40} of this node's CustomNodeConfig")
            body = {"spec": fetched.spec} if kind.root[0] == "spec" else {"status": fetched.status}
        return ConfigObject(resource=resource, key=key, hash=content, since_wall_ns=time.time_ns(), body=body)

    async def _change(self, desired: Mapping[str, ConfigObject]) -> bool:
        before = self._dynamic.desired
        same = desired.keys() == before.keys() and all(each.same(before[name]) for name, each in desired.items())
        if not same:
            self._dynamic.change(desired)
        if not same or self._dynamic.save_error is not None:
            await asyncio.to_thread(self._dynamic.save)
        return not same
