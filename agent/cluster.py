"""What the agent has to do with the cluster's API server: it reports there, and obeys what is configured there.

Loaded only where a node's name was given; nothing here ever keeps a round waiting.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from agent.config import Config
from agent.dynamic.follow import Follower, Rules
from agent.report.cnr_writer import CnrWriter
from agent.report.events import EventWriter
from agent.report.extended import ExtendedResources
from agent.sense.documents import check
from api import VERSION
from api.configuration import Configuration
from api.ports import Probe, Sink
from kube.client import Client
from kube.config import find


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that work while the agent runs: each sink and source is one of them."""

    sinks: tuple[Sink, ...]
    sources: tuple[Probe, ...]
    told: Callable[[], Configuration]
    obeyed: Callable[[], Mapping[tuple[str, ...], bool]]
    client: Client
    runs: tuple[Callable[[], Coroutine[Any, Any, None]], ...]
    follower: Follower

    def start(self, obey: Callable[[Config], None], stack: AsyncExitStack) -> None:
        """Begin, until the stack is left; `obey` is given the settings whenever they change."""
        for work in (*(run() for run in self.runs), self.follower.run(obey)):
            task = asyncio.create_task(work)
            stack.callback(task.cancel)


async def join(node: str, rules: Rules, config: Config, stack: AsyncExitStack) -> Joined:
    """Find the API server as kubectl does; whether it answers is seen later. Raises Unavailable where it is nowhere named."""
    access = find(os.environ, check)
    client = await stack.enter_async_context(Client(access, f"dioptase-agent/{VERSION}"))
    follower = Follower(client, node, rules)
    cnr, events = CnrWriter(client, node, metrics=config.report.node_metrics), EventWriter(client, node)
    writers: tuple[CnrWriter | EventWriter | ExtendedResources, ...] = (cnr, events)
    if config.report.extended_resources:
        extended = ExtendedResources(client, node)
        stack.push_async_callback(extended.withdraw)
        writers += (extended,)
    return Joined(
        sinks=writers,
        sources=(follower, *writers),
        told=follower.told,
        obeyed=rules.obeyed,
        client=client,
        runs=tuple(writer.run for writer in writers),
        follower=follower,
    )
