"""Parts of the agent that only some settings ask for: each is loaded, and opened, only then."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.calls import CALLS
from agent.config import Config
from agent.forecast_state import ForecastFile
from agent.hierarchy import Hierarchy, detect
from agent.qrm.knobs import KnobFiles
from agent.sense.pods import NoPods, StaticPods
from agent.sense.podspec import Door
from agent.sense.running import find_socket
from agent.settings import built, load_document
from agent.tending import Tending
from api.checks import Check
from api.configuration import Configuration
from api.decisions import Act, Outcome
from api.ports import PodSource, Probe, Sink, Unavailable

if TYPE_CHECKING:
    from agent.cluster import Joined
    from agent.dynamic.follow import Rules
    from agent.evicting import Beside
    from agent.eviction.evictor import Evictor
    from agent.foreseen import Basis
    from agent.neighbours import Neighbours
    from agent.qrm.foretold import Foretold
    from agent.qrm.node_knobs import NodeKnobs
    from agent.qrm.originals import Originals
    from agent.runtime_side import RuntimeSide

NS_PER_S = 1_000_000_000
CARRIED_OUT = ("advisor", "resource-plugins")
"""Sockets whose other side does what is decided here, whether or not this agent does too."""
State = tuple[Path, str]
"""The state directory, and the id of this boot."""
NODE_ORIGINALS, OOM_ORIGINALS, RESCTRL_GROUPS = "node-originals.json", "oom-originals.json", "fs/resctrl/dioptase-*"
"""As agent.qrm.node_files, oom_scores and resctrl have them, which are loaded only where they are needed."""


def settings(path: Path | None, probes: Collection[str], proc: Path | None) -> tuple[Mapping[str, Any], Config]:
    """What the settings file says, and the settings. With `proc`, whose mounts have the cgroups, those that name cgroups
    are, unless set, the kubelet's. Raises ConfigError, and Unavailable where there are no cgroups."""
    document, config = load_document(path, probes)
    if proc is None:
        return document, config
    from agent.kubelet_roots import rooted  # noqa: PLC0415 - where pods are not a kubelet's, there are none of its cgroups

    document = rooted(document, config.kubelet.cgroup_root, partial(exists, detect(proc).primary))
    return document, built(document, str(path or "the kubelet's cgroups"))


def open_knobs(config: Config, hierarchy: Hierarchy, *, kubelet: bool) -> KnobFiles:
    """Whoever writes the knobs. Raises Unavailable."""
    socket = find_socket(config.kubelet.runtime_socket) if kubelet and config.kubelet.writer == "cri" else None
    if socket is None:
        return KnobFiles(hierarchy)
    from agent.qrm.by_runtime import KnobsByRuntime  # noqa: PLC0415 - gRPC is 12 MiB

    return KnobsByRuntime(hierarchy, socket)


def open_evictor(
    config: Config, act: Act, hierarchy: Hierarchy, stack: AsyncExitStack, *, node: str, kubelet: bool
) -> Evictor | None:
    """The eviction manager, if a plugin is named, asked at a socket, or may be named while the agent runs, because the cluster
    tells it its settings; it asks nobody to leave unless the agent acts. Raises Unavailable."""
    if not (config.eviction.plugins or config.eviction.plugin_sockets or node) or act is Act.OFF:
        return None
    from agent.evicting import open_killer  # noqa: PLC0415 - twenty plugins, which most nodes name none of
    from agent.eviction.evictor import Evictor  # noqa: PLC0415

    killer = None
    if act is Act.ON:
        killer = open_killer(config.eviction, hierarchy, node=node, kubelet=kubelet)
        stack.callback(killer.close)
    return Evictor(config, killer)


def hardware(config: Config, sys: Path) -> tuple[Probe, ...]:
    """Sources that say what the machine lacks for what the settings ask of it."""
    if not config.power.enable:
        return ()
    from agent.sense.power_caps import PowerCaps  # noqa: PLC0415 - few nodes ask for it

    return (PowerCaps(sys),)


def node_checks(state_dir: Path) -> tuple[Check, ...]:
    """What this node can and cannot do, for whoever asks over HTTP; the probes say themselves how they fare, as sources."""
    from agent import doctor  # noqa: PLC0415 - few ask

    return doctor.checks(state_dir)


def open_forecasts(config: Config, act: Act, state: State, stack: AsyncExitStack) -> ForecastFile | None:
    """The predictor's history, where this agent judges and keeps score; it must have the state directory to itself."""
    if act is Act.OFF or config.forecast.method != "calibrated":
        return None
    kept = ForecastFile(*state)
    stack.callback(kept.close)
    return kept


def open_node_knobs(
    config: Config, act: Act, hierarchy: Hierarchy, state: State, sys: Path
) -> tuple[NodeKnobs | None, tuple[str, ...]]:
    """Settings of disks, caches and processes, where there are any or an earlier agent had some; why they are left alone."""
    journals = (state[0] / name for name in (NODE_ORIGINALS, OOM_ORIGINALS))
    left = act is Act.ON and (any(journal.exists() for journal in journals) or any(sys.glob(RESCTRL_GROUPS)))
    if act is Act.OFF or not (config.knobs.of_the_node or left):
        return None, ()
    from agent.qrm import node_knobs  # noqa: PLC0415 - few nodes set any

    try:
        return node_knobs.open_node_knobs(config.knobs, hierarchy, state, sys, dry=act is not Act.ON), ()
    except Unavailable as error:
        return None, (f"Disks, caches and OOM scores are left alone: {error.reason}: {error.remedy}.",)


async def open_kubelet(
    config: Config, door: Door, hierarchy: Hierarchy, tending: Tending
) -> tuple[PodSource, tuple[Probe, ...]]:
    """The pods of the kubelet and of the container runtime, and how both fare, who were asked once already; what cannot be
    asked now is asked again, and shown."""
    from agent.sense.kubelet import CONFIGZ, Kubelet  # noqa: PLC0415 - the others have their pods from a file, or none
    from agent.sense.kubelet_managers import Asking, ManagersProbe  # noqa: PLC0415
    from agent.sense.kubepods import KubePods  # noqa: PLC0415
    from agent.sense.podjoin import Node  # noqa: PLC0415

    runtime, socket, stack = None, find_socket(config.kubelet.runtime_socket), tending.stack
    if socket is not None:
        from agent.sense.cri import Runtime  # noqa: PLC0415 - gRPC is 12 MiB

        runtime = Runtime(socket, config.kubelet.timeout_s)
        stack.push_async_callback(runtime.close)
    kubelet = await stack.enter_async_context(Kubelet(config.kubelet))
    node = Node(door=door, exists=partial(exists, hierarchy.primary), cgroup_root=config.kubelet.cgroup_root)
    pods = KubePods(kubelet, runtime, node, config.kubelet)
    managers = Asking(await stack.enter_async_context(Kubelet(config.kubelet, CONFIGZ)))
    await asyncio.gather(pods.turn(), managers.look())
    tending.begin("asking for pods", pods.run)
    tending.begin("asking for the kubelet's managers", managers.run)
    wants = config.advisor.policy == "canonical"
    return pods, (*pods.probes(), ManagersProbe(Path(config.kubelet.root_dir), managers, wants_cpusets=wants))


class Nobody:
    """RuntimeSide where the pods are a file's."""

    foretold: Foretold | None = None
    probes: tuple[Probe, ...] = ()
    answers: Mapping[str, int] = {}

    def start(self, basis: Callable[[], Basis | None]) -> None: ...

    def end(self, files: KnobFiles, originals: Originals | None) -> tuple[Outcome, ...]:  # noqa: ARG002 - as the other's
        return ()

    def leave(self, files: KnobFiles) -> None: ...


def runtime_side(
    config: Config, act: Act, pods: PodSource, hierarchy: Hierarchy, door: Door, state_dir: Path
) -> RuntimeSide | Nobody:
    """The kubelet's and the runtime's part in acting, where the pods are theirs; who acts has that directory to himself."""
    if isinstance(pods, (StaticPods, NoPods)):
        return Nobody()
    from agent.runtime_side import RuntimeSide  # noqa: PLC0415 - what speaks to them
    from agent.sense.kubepods import KubePods  # noqa: PLC0415

    assert isinstance(pods, KubePods)
    return RuntimeSide(config, act, pods, door, hierarchy, state_dir)


def patience_ns(config: Config) -> int:
    """How long a container that ended may still be listed with the kubelet's pods: it is asked now and then, and slow."""
    return round(2 * (config.kubelet.interval_s + config.kubelet.timeout_s) * NS_PER_S)


def exists(mount: Path, cgroup: str) -> bool:
    """Whether there is such a cgroup."""
    return os.path.isdir(f"{mount}{cgroup}")  # noqa: PTH112 - thousands a second


class Cluster:
    """The cluster's side of the agent: who is reported to, and obeyed, and the neighbours at sockets. Without a node's name,
    and where the settings name no socket, there is nobody."""

    def __init__(self, node: str, state_dir: Path | None, *, kubelet: bool = False) -> None:
        """What was obeyed last is remembered in `state_dir`; nowhere, where somebody else has it. `kubelet` says whether there
        is one to ask."""
        self._node, self._state_dir, self._kubelet = node, state_dir, kubelet
        self._file: Mapping[str, Any] = {}
        self._config, self._started_wall_ns = Config(), time.time_ns()
        self._rules: Rules | None = None
        self._joined: Joined | None = None
        self.neighbours: Neighbours | None = None
        """Those at sockets, once they were joined."""
        self._evicting: tuple[Beside, ...] = ()

    def open(
        self, file: Mapping[str, Any], config: Config, fits: Callable[[Config], str]
    ) -> tuple[Config, tuple[str, ...]]:
        """The settings that come of the file and of what was obeyed last, and what of that was lost. Raises Unavailable."""
        self._file, self._config = file, config
        if not self._node:
            return config, ()
        from agent.dynamic.follow import Rules  # noqa: PLC0415 - the types of Katalyst's kinds
        from agent.dynamic.saved import ObeyedFile  # noqa: PLC0415

        saved = None if self._state_dir is None else ObeyedFile(self._state_dir, self._node)
        self._rules = Rules(file, config, fits, saved)
        return self._rules.config, self._rules.messages

    async def join(self, config: Config, act: Act, evictor: Evictor | None, tending: Tending) -> tuple[Sink, ...]:
        """Who is shown the rounds, to report them, with what the eviction manager has beside them. Raises Unavailable where no
        API server is named."""
        told = config.sockets
        if act is not Act.OFF and (told.serve or told.take):
            from agent.neighbours import Neighbours  # noqa: PLC0415 - gRPC is 12 MiB, and most agents stand alone

            self.neighbours = Neighbours(config)
        sinks: tuple[Sink, ...] = () if self.neighbours is None else self.neighbours.sinks
        if self._rules is not None:
            from agent.cluster import join  # noqa: PLC0415

            # In a dry run nobody takes back what is lent, unless decisions are carried out by those who ask for them.
            lends = act is Act.ON or (act is Act.DRY_RUN and any(one in CARRIED_OUT for one in told.serve))
            self._joined = await join(self._node, self._rules, tending.stack, kubelet=self._kubelet, lends=lends)
            sinks = (*self._joined.sinks, *sinks)
        if evictor is not None:
            from agent import evicting  # noqa: PLC0415 - as in open_evictor

            client = None if self._joined is None else self._joined.client
            self._evicting = await evicting.join(evictor, config, client, self._node, tending, kubelet=self._kubelet)
        return (*sinks, *self._evicting)

    @property
    def sources(self) -> tuple[Probe, ...]:
        """How that goes, once it was joined."""
        beside = (*(() if self.neighbours is None else self.neighbours.sources), *self._evicting)
        return beside if self._joined is None else (*self._joined.sources, *beside)

    def start(self, obey: Callable[[Config], None], tending: Tending) -> None:
        """Begin to report and to obey."""
        if self._joined is not None:
            self._joined.start(obey, tending)
        if self.neighbours is not None:
            self.neighbours.start(tending)

    def exchanged(self) -> Mapping[str, Any]:
        """What exporters say of sockets: all calls, and what came of those of the neighbours. Any thread may ask."""
        if self.neighbours is None:
            return {"calls": CALLS.copy()}
        return {"calls": CALLS.copy(), "advice_ages_s": self.neighbours.ages_s(), "peers": self.neighbours.peers()}

    async def review(self, token: str, path: str) -> bool | None:
        """Whether the account of this token may get that path; None: it is nobody's. Raises Unavailable."""
        if self._joined is None:
            raise Unavailable("the agent has not joined its cluster yet", "ask again in a second")
        from kube.review import review  # noqa: PLC0415 - only some are asked for

        return await review(self._joined.client, token, path)

    def requests(self) -> Mapping[tuple[str, str, str], int]:
        """To the API server so far, by method, resource and status. Any thread may ask."""
        return {} if self._joined is None else self._joined.client.requests.copy()

    def obeyed(self) -> Mapping[tuple[str, ...], bool]:
        """By kind, key and hash: the objects that are obeyed, and those that cannot be."""
        return {} if self._joined is None else self._joined.obeyed()

    def told(self) -> Configuration:
        """Every setting, and where it came from."""
        if self._joined is not None:
            return self._joined.told()
        from agent.dynamic.overlay import Settled  # noqa: PLC0415 - few ask
        from agent.dynamic.told import configuration  # noqa: PLC0415

        return configuration(Settled(self._config, {}, {}, {}, {}), self._file, self._started_wall_ns)
