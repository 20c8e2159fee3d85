"""When an agent may be measured: it has finished a round, and all its probes are loaded or refused.

Compiling the probes takes the agent's child seconds of CPU after its start, which are neither the workloads' nor, once the
child has ended, to be seen as the agent's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from cli.child import AgentEnded
from exporters.view import View
from probes.background import LOADING

LOADED_WITHIN_S = 120.0
POLL_S = 0.2


class Started(Protocol):
    """An agent as far as it is waited for; cli.child.AgentChild is one."""

    def wait_healthy(self) -> None:
        """Return when it has finished a round."""

    def get(self, path: str, timeout_s: float = 2.0) -> bytes | None:
        """The body at that path; None where there is no good answer now."""


def wait_ready(agent: Started, clock: Callable[[], float] = time.monotonic) -> None:
    """Return when no source says any more that it is loading. Raises AgentEnded where that does not come about."""
    agent.wait_healthy()
    deadline = clock() + LOADED_WITHIN_S
    while still := _loading(agent.get("/api/v1/view")):
        if clock() > deadline:
            raise AgentEnded(f"still not loaded after {LOADED_WITHIN_S:.0f} s: {', '.join(still)}")
        time.sleep(POLL_S)


def _loading(view_json: bytes | None) -> list[str]:
    if view_json is None:
        return ["the agent does not answer"]
    return [source.name for source in msgspec.json.decode(view_json, type=View).sources if source.detail == LOADING]
