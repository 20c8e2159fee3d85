"""What the agent has to do with the cluster's API server: it reports there, and obeys what is configured there.

Loaded only where a node's name was given; nothing here ever keeps a round waiting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from agent.config import Config
from agent.dynamic.follow import Follower, Rules
from agent.report.beside import Beside
from agent.report.cnr_writer import CnrWriter
from agent.report.events import EventWriter
from agent.report.extended import ExtendedResources
from agent.report.kubelet import Neighbourhood
from agent.sense.documents import check
from agent.sense.kubelet import CONFIGZ, Kubelet
from agent.tending import Tending
from api import VERSION
from api.configuration import Configuration
from api.ports import Probe, Sink
from api.reports import ReportedField
from kube.client import Client
from kube.config import find

POD_RESOURCES = "pod-resources/kubelet.sock"
"""Below the kubelet's root."""


class Source(Probe, Protocol):
    """Works in a task of its own, and says how it goes."""

    async def run(self) -> None: ...


class Part(Source, Sink, Protocol):
    """The same of one that is shown the rounds."""


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that work while the agent runs: each sink and source is one of them."""

    sinks: tuple[Sink, ...]
    sources: tuple[Probe, ...]
    told: Callable[[], Configuration]
    obeyed: Callable[[], Mapping[tuple[str, ...], bool]]
    client: Client
    parts: tuple[Source, ...]
    follower: Follower

    def start(self, obey: Callable[[Config], None], tending: Tending) -> None:
        """Begin; `obey` is given the settings whenever they change."""
        for part in self.parts:
            tending.begin(part.name, part.run)
        tending.begin(self.follower.name, partial(self.follower.run, obey))


async def join(node: str, rules: Rules, stack: AsyncExitStack, *, kubelet: bool, lends: bool) -> Joined:
    """Find the API server as kubectl does; whether it answers is seen later. `kubelet` is asked too, where there is one;
    `lends` says whether somebody takes back what is lent. Raises Unavailable where no API server is named."""
    access = find(os.environ, check)
    client = await stack.enter_async_context(Client(access, f"dioptase-agent/{VERSION}"))
    config, follower = rules.config, Follower(client, node, rules)
    writers: list[Part] = []
    others: list[Source] = []
    if config.report.offered_in:
        from agent.report.protocol.offered import Offered  # noqa: PLC0415 - gRPC is 12 MiB

        writers.append(Offered(Path(config.report.offered_in), lends=lends))
    else:
        cnr, others = await open_cnr(client, node, config, stack, kubelet=kubelet, lends=lends)
        writers.append(cnr)
    writers.append(EventWriter(client, node))
    if config.report.extended_resources:
        extended = ExtendedResources(client, node, lends=lends)
        stack.push_async_callback(extended.withdraw)
        writers.append(extended)
    return Joined(
        sinks=tuple(writers),
        sources=(follower, *writers, *others),
        told=follower.told,
        obeyed=rules.obeyed,
        client=client,
        parts=(*writers, *others),
        follower=follower,
    )


async def open_cnr(
    client: Client, node: str, config: Config, stack: AsyncExitStack, *, kubelet: bool, lends: bool
) -> tuple[CnrWriter, list[Source]]:
    """Who writes the node's CustomNodeResource, and whom he asks what to say beside the rounds: their `run` is to be run."""
    report, asked, shares = config.report, None, None
    if kubelet:
        asked = await stack.enter_async_context(Kubelet(config.kubelet.named(node), CONFIGZ))
    socket, usual = report.pod_resources, Path(config.kubelet.root_dir) / POD_RESOURCES
    if socket is None and kubelet and usual.exists():
        socket = str(usual)
    if socket:
        from agent.qrm.protocol.pod_resources import PodResources  # noqa: PLC0415 - gRPC is 12 MiB

        shares = PodResources(Path(socket))
        stack.push_async_callback(shares.close)
    start = Beside(cpu_flags=report.cpu_flags, zone_types=report.device_zones)
    around = Neighbourhood((Path("/proc"), Path("/sys")), start, asked, shares)
    others: list[Source] = [around]
    fields: Callable[[], tuple[ReportedField, ...]] = tuple
    cnr = CnrWriter(
        client,
        node,
        metrics=report.node_metrics,
        beside=lambda: msgspec.structs.replace(around.beside, fields=fields()),
        lends=lends,
    )
    if report.reporter_plugins:
        from agent.report.plugins import Reporters  # noqa: PLC0415 - gRPC is 12 MiB

        reporters = Reporters(Path(report.reporter_plugins), cnr.wake)
        fields = reporters.fields
        others.append(reporters)
    return cnr, others
