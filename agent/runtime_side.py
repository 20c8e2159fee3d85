"""The kubelet's and the container runtime's part in acting: asked before a container is made, and told apart from drift.

Loaded only with `--kubelet`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from agent.config import Config
from agent.foreseen import Basis
from agent.hierarchy import Hierarchy
from agent.qrm.foretold import Foretold
from agent.qrm.knobs import KnobFiles
from agent.qrm.originals import Originals
from agent.sense.kubepods import KubePods
from agent.sense.podspec import Door
from api.decisions import Act, Outcome
from api.ports import Probe, Unavailable

log = logging.getLogger("dioptase")
NRI_SOCKET = Path("/var/run/nri/nri.sock")
MADE_S, LOOK_S = 2.0, 0.05
"""So long after its runtime was answered a container's cgroup is waited for at the end, and how often it is looked for. Whoever
comes later is told of to the runtime."""


class RuntimeSide:
    """Made before the first round; `start` once there is a loop to ask, `end` before anything is put back, `leave` after it."""

    def __init__(
        self, config: Config, act: Act, pods: KubePods, door: Door, hierarchy: Hierarchy, state_dir: Path
    ) -> None:
        self.foretold = Foretold()
        self._basis: Callable[[], Basis | None] = lambda: None
        self._plugin = None
        socket = nri_socket(config.kubelet.nri_socket)
        if act is not Act.ON or socket is None:
            return
        from agent.nri.answers import Surroundings  # noqa: PLC0415 - protobuf, which few need without a runtime's socket
        from agent.nri.notes import open_notes  # noqa: PLC0415
        from agent.nri.plugin import Plugin  # noqa: PLC0415

        loop = asyncio.get_running_loop()
        surroundings = Surroundings(
            basis=self._latest,
            listed=pods.listed,
            wake=lambda: _wake(loop, pods),
            door=door,
            hierarchy=hierarchy,
            foretold=self.foretold,
        )
        self._plugin = Plugin(socket, surroundings, open_notes(state_dir), config.kubelet.nri_patience_s)

    @property
    def probes(self) -> tuple[Probe, ...]:
        """How they fare."""
        return () if self._plugin is None else (self._plugin.source,)

    @property
    def answers(self) -> Mapping[str, int]:
        """To the runtime's questions so far. Any thread may ask."""
        return {} if self._plugin is None else self._plugin.counts

    def _latest(self) -> Basis | None:
        return self._basis()

    def start(self, basis: Callable[[], Basis | None]) -> None:
        """Begin to answer."""
        self._basis = basis
        if self._plugin is not None:
            self._plugin.start()

    def end(self, files: KnobFiles, originals: Originals | None) -> tuple[Outcome, ...]:
        """Nobody is made with values of ours any more, and what was is known to the journal, those included that a runtime is
        just making; what came of those since the latest round. Idempotent."""
        if self._plugin is not None:
            self._plugin.silence()
        if originals is None:
            return ()
        began = time.monotonic()
        try:
            self.foretold.adopt(files, originals)
            while self.foretold.pending(began - MADE_S) and time.monotonic() < began + MADE_S:
                time.sleep(LOOK_S)
                self.foretold.adopt(files, originals)
        except Unavailable as error:
            log.error("%s: %s", error.reason, error.remedy)
        except Exception:
            # Whatever is wrong here, all others are put back.
            log.exception("what was made with values of this agent's a moment ago may keep them")
        return self.foretold.outcomes()

    def leave(self, files: KnobFiles) -> None:
        """The runtime believes of nobody that he has values of ours, and hears of us no more. Idempotent."""
        if self._plugin is not None:
            self._plugin.leave(files, self.foretold.pending(0.0))
            self._plugin.close()


def nri_socket(configured: str | None) -> Path | None:
    """The socket of the settings, or the usual one where it is; None where none is to be asked, or none is there."""
    if configured is not None:
        return Path(configured.removeprefix("unix://")) if configured else None
    return NRI_SOCKET if NRI_SOCKET.is_socket() else None


def _wake(loop: asyncio.AbstractEventLoop, pods: KubePods) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(pods.nudge)
