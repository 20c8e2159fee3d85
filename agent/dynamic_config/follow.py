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
from agent.config.loader import NodeCheck
from agent.dynamic_config.last_good import LastGoodFile
from agent.dynamic_config.merge import ConfigObject, ResolvedConfig, resolve_config
from agent.dynamic_config.translate import CONFIG_KINDS, GROUP, VERSION
from api.interfaces import ProbeReading, Unavailable
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
"""How often it is looked at whether the watch still hears something, and what is not there any more."""
RETENTION_S = 2 * 3600.0
"""A node that has no CustomNodeConfig any longer obeys what it did for so long."""
STARTUP_GRACE_S = 10.0
"""It is no trouble yet that nothing was heard before."""
WATCH_STALE_S = 600.0
"""A watch is renewed after eight minutes at most: one that says nothing for longer hears nothing."""


class DynamicConfig:
    """What is in force: the settings file, and what the cluster says on top. `obey` is told of each change."""

    def __init__(
        self, file: Mapping[str, Any], config: AgentConfig, fits: NodeCheck, saved: LastGoodFile | None
    ) -> None:
        """`file` is what the settings file itself says, `config` what comes of it. Raises Unavailable where a damaged file of
        what was obeyed cannot be set aside."""
        self._document, self._file, self._fits, self._saved = file, config, fits, saved
        self._started_wall_ns = time.time_ns()
        self.wanted: Mapping[str, ConfigObject] = {} if saved is None else saved.load()
        self.settled: ResolvedConfig = resolve_config(config, self.wanted, self.wanted, fits)
        self.messages = () if saved is None else saved.messages
        self.save_error: Unavailable | None = None

    @property
    def config(self) -> AgentConfig:
        return self.settled.config

    def change(self, wanted: Mapping[str, ConfigObject]) -> None:
        """These are to be obeyed from now on, and no others."""
        before = self.settled
        self.wanted = wanted
        self.settled = resolve_config(self._file, before.obeyed, wanted, self._fits)
        for resource, problem in self.settled.problems.items():
            if before.problems.get(resource) != problem:
                stands = (
                    "what was obeyed before stands" if resource in self.settled.obeyed else "nothing of it is obeyed"
                )
                log.error("%s %s: %s; %s", CONFIG_KINDS[resource].kind, wanted[resource].key, problem, stands)
        for resource, obeyed in self.settled.obeyed.items():
            if not obeyed.same(before.obeyed.get(resource)):
                log.info("%s %s (%s) is obeyed", CONFIG_KINDS[resource].kind, obeyed.key, obeyed.hash)
                for unused in self.settled.unused.get(resource, ()):
                    log.warning("%s %s: %s", CONFIG_KINDS[resource].kind, obeyed.key, unused)
        for resource in before.obeyed.keys() - self.settled.obeyed.keys():
            log.info("%s %s is obeyed no longer", CONFIG_KINDS[resource].kind, before.obeyed[resource].key)

    def save(self) -> None:
        """Have on disk what is obeyed. Never raises: `unsaved` says why it is not."""
        if self._saved is None:
            return
        try:
            self._saved.save(self.settled.obeyed)
            self.save_error = None
        except Unavailable as error:
            self.save_error = error

    def obeyed(self) -> Mapping[tuple[str, ...], bool]:
        """By kind, key and hash: what is obeyed, and what was to be and cannot."""
        kept, wanted = self.settled.obeyed.values(), self.wanted.values()
        held = {_object_labels(one): True for one in kept}
        return {**{_object_labels(one): False for one in wanted}, **held}

    def told(self) -> EffectiveConfiguration:
        """Every setting, with its source."""
        from agent.dynamic_config.effective import effective_configuration  # noqa: PLC0415 - most agents are never asked

        return effective_configuration(self.settled, self._document, self._started_wall_ns, self.wanted)


def _object_labels(one: ConfigObject) -> tuple[str, ...]:
    return (CONFIG_KINDS[one.resource].kind, one.key, one.hash)


def has_other_content(found: UnstructuredObject, content: str) -> bool:
    """Whether an object has another content than that of this hash: then it is rolled out to others first, or cannot stand, and
    a node that has lost what it was told must not have it before its turn. Its status says so; where nobody writes one, not."""
    status, generation = found.status, found.metadata.generation
    if not status.get("currentHash"):
        return False
    conditions = status.get("conditions") or ()
    invalid = any(
        isinstance(one, Mapping) and (one.get("type"), one.get("status")) == ("Valid", "False") for one in conditions
    )
    unseen = status.get("observedGeneration") and status["observedGeneration"] != generation
    return bool(status["currentHash"] != content or unseen or invalid)


class CustomNodeConfigFollower:
    """Follows one node's CustomNodeConfig, and is a source of its own (api.interfaces.Probe) that says how that goes."""

    name = "dynamic-config"

    def __init__(self, client: KubeClient, node: str, rules: DynamicConfig) -> None:
        self._client, self._node, self._rules = client, node, rules
        self._informer = Informer(client, CNC_RESOURCE, ListScope(fields=f"metadata.name={node}"))
        self._wake = asyncio.Event()
        self._informer.listen(lambda _: self._wake.set())
        self._failures, self._not_before_s = 0, 0.0
        self._failed = ""
        self._lost_at_s: float | None = None
        self._began_s = time.monotonic()
        self._ignored: frozenset[str] = frozenset()

    async def run(self, apply_config: Callable[[AgentConfig], None]) -> None:
        """Until cancelled; `obey` is given what is in force whenever that changes. Nothing that the API server says or does
        ends it."""
        watching = asyncio.create_task(self._informer.run())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), CHECK_INTERVAL_S)
                if watching.done():
                    watching.result()  # it ends by a bug alone, which ends this too
                if await self.look():
                    apply_config(self._rules.config)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def told(self) -> EffectiveConfiguration:
        """Every setting, and whether the API server still tells."""
        problem = self.problem()
        return msgspec.structs.replace(
            self._rules.told(), node=self._node, problem="" if problem is None else problem.reason
        )

    @property
    def form(self) -> str:
        return "watch"

    @property
    def lost_events(self) -> int | None:
        return None

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - as every source is asked
        return ProbeReading()

    def problem(self) -> Unavailable | None:
        """What keeps this node from obeying, the most serious first."""
        for resource, problem in self._rules.settled.problems.items():
            key = self._rules.wanted[resource].key if resource in self._rules.wanted else ""
            return Unavailable(
                f"{CONFIG_KINDS[resource].kind} {key}: {problem}", "correct it: until then the last good one stands"
            )
        if self._failed:
            return Unavailable(self._failed, "what was obeyed before stands; it is asked for again")
        now_s = time.monotonic()
        age_s = self._informer.age_s(now_s)
        silent = now_s - self._began_s > STARTUP_GRACE_S if age_s is None else age_s > WATCH_STALE_S
        if silent:
            said = "was never heard of" if age_s is None else f"was last heard of {age_s:.0f} s ago"
            return Unavailable(
                f"CustomNodeConfig {self._node} {said}",
                "what was obeyed before stands; see whether the API server is reachable, and the agent's role has watch",
            )
        return self._rules.save_error

    def close(self) -> None:
        """Nothing to give back: `run` is cancelled by who runs it."""

    async def look(self) -> bool:
        """One look at what is known of the CustomNodeConfig; whether something else is in force now."""
        self._wake.clear()
        if not self._informer.synced.is_set() or time.monotonic() < self._not_before_s:
            return False
        cnc = self._informer.store.get(self._node)
        if cnc is None:
            return await self._gone()
        self._lost_at_s = None
        targets = () if cnc.status is None else cnc.status.katalyst_custom_config_list or ()
        wanted, failed = await self._fetched(self._named(targets))
        self._failed = failed
        self._failures = self._failures + 1 if failed else 0
        self._not_before_s = time.monotonic() + FETCH_BACKOFF.wait_s(self._failures, random.random())
        return await self._change(wanted)

    async def _gone(self) -> bool:
        """There is none: not yet, not any more, or it does not fit its type and never did."""
        now_s = time.monotonic()
        if self._lost_at_s is None:
            self._lost_at_s = now_s
        self._failed = ""
        if self._rules.settled.obeyed and now_s - self._lost_at_s < RETENTION_S:
            problem = self._informer.problems.get(self._node, "")
            self._failed = (
                f"there is no CustomNodeConfig {self._node}"
                if not problem
                else f"CustomNodeConfig {self._node}: {problem}"
            )
            return False
        return await self._change({})

    def _named(self, targets: tuple[TargetConfig, ...]) -> dict[str, TargetConfig]:
        """What is to be fetched, by resource; what nobody here knows is said once."""
        named: dict[str, TargetConfig] = {}
        unknown = set()
        for target in targets:
            kind = target.config_type
            if kind.group != GROUP or kind.version != VERSION or kind.resource not in CONFIG_KINDS:
                unknown.add(f"{kind.resource:.80}.{kind.version:.20}.{kind.group:.80}")
            else:
                named.setdefault(kind.resource, target)
        for name in sorted(unknown - self._ignored):
            log.warning("CustomNodeConfig %s names %s, of which nothing is known here", self._node, name)
        self._ignored = frozenset(unknown)
        return named

    async def _fetched(self, named: Mapping[str, TargetConfig]) -> tuple[dict[str, ConfigObject], str]:
        """The objects, those fetched before included; and what could not be fetched."""
        wanted: dict[str, ConfigObject] = {}
        failed = ""
        for resource, target in named.items():
            key = f"{target.config_namespace}/{target.config_name}" if target.config_namespace else target.config_name
            known = self._rules.wanted.get(resource)
            if known is not None and (known.key, known.hash) == (key, target.hash):
                wanted[resource] = known
                continue
            try:
                wanted[resource] = await self._fetch(resource, key, target.hash)
            except (ApiError, ApiUnreachable, ValueError) as error:
                failed = f"{CONFIG_KINDS[resource].kind} {key:.300} cannot be fetched: {error}"
                log.warning("%s", failed)
                if known is not None:
                    wanted[resource] = known
        return wanted, failed

    async def _fetch(self, resource: str, key: str, content: str) -> ConfigObject:
        grammar = CONFIG_KINDS[resource]
        body: dict[str, Any] = {}
        if not grammar.all_unused:  # passwords that nobody asks for are best not in memory, nor on disk
            kind = ResourceType(GROUP, VERSION, resource, grammar.kind, UnstructuredObject, namespaced="/" in key)
            found = await self._client.get(kind, key)
            if has_other_content(found, content):
                raise ValueError(f"it says something else by now than the {content:.40} that this node is told")
            body = {"spec": found.spec} if grammar.root[0] == "spec" else {"status": found.status}
        return ConfigObject(resource=resource, key=key, hash=content, since_wall_ns=time.time_ns(), body=body)

    async def _change(self, wanted: Mapping[str, ConfigObject]) -> bool:
        before = self._rules.wanted
        same = wanted.keys() == before.keys() and all(one.same(before[name]) for name, one in wanted.items())
        if not same:
            self._rules.change(wanted)
        if not same or self._rules.save_error is not None:
            await asyncio.to_thread(self._rules.save)
        return not same
