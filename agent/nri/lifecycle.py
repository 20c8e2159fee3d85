"""Lifetime of the NRI plugin: opened before the first cycle, silenced and restored at shutdown.
Loaded only with `--kubelet`. It imports the plugin itself only where an NRI socket exists, because of protobuf.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from agent.advisor.preview import PreviewInputs
from agent.config.config import AgentConfig
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.pending_originals import PendingOriginals
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.pods.kubelet_pods import KubeletPodSource
from agent.sensors.pods.pod_spec import PodParsingContext
from api.decision import ActMode, Outcome
from api.interfaces import Probe, Unavailable

log = logging.getLogger("dioptase")
NRI_SOCKET = Path("/var/run/nri/nri.sock")
CREATION_WAIT_S, CREATION_POLL_S = 2.0, 0.05
"""So long after its runtime was answered a container's cgroup is waited for at the end, and how often it is looked for. Whoever
comes later is told of to the runtime."""


class NriLifecycle:
    """Made before the first round; `start` once there is a loop to ask, `end` before anything is put back, `leave` after it."""

    def __init__(
        self,
        config: AgentConfig,
        act: ActMode,
        pods: KubeletPodSource,
        door: PodParsingContext,
        hierarchy: Hierarchy,
        state_dir: Path,
    ) -> None:
        self.pending_originals = PendingOriginals()
        self._basis: Callable[[], PreviewInputs | None] = lambda: None
        self._plugin = None
        socket = nri_socket(config.kubelet.nri_socket)
        if act is not ActMode.ON or socket is None:
            return
        from agent.nri.adjustments import NriContext  # noqa: PLC0415 - protobuf, which few need without a runtime's socket
        from agent.nri.plugin import NriPlugin  # noqa: PLC0415
        from agent.nri.signed_annotation import open_signed_annotations  # noqa: PLC0415

        loop = asyncio.get_running_loop()
        surroundings = NriContext(
            preview_inputs=self._latest,
            listed=pods.listed,
            wake=lambda: _refresh_pods(loop, pods),
            door=door,
            hierarchy=hierarchy,
            foretold=self.pending_originals,
        )
        self._plugin = NriPlugin(
            socket, surroundings, open_signed_annotations(state_dir), config.kubelet.nri_patience_s
        )

    @property
    def probes(self) -> tuple[Probe, ...]:
        """How they fare."""
        return () if self._plugin is None else (self._plugin.source,)

    @property
    def answers(self) -> Mapping[str, int]:
        """To the runtime's questions so far. Any thread may ask."""
        return {} if self._plugin is None else self._plugin.counts

    def _latest(self) -> PreviewInputs | None:
        return self._basis()

    def start(self, preview_inputs: Callable[[], PreviewInputs | None]) -> None:
        """Begin to answer."""
        self._basis = preview_inputs
        if self._plugin is not None:
            self._plugin.start()

    def end(self, files: KnobWriter, originals: OriginalsJournal | None) -> tuple[Outcome, ...]:
        """Nobody is made with values of ours any more, and what was is known to the journal, those included that a runtime is
        just making; what came of those since the latest round. Idempotent."""
        if self._plugin is not None:
            self._plugin.stop_adjusting()
        if originals is None:
            return ()
        began = time.monotonic()
        try:
            self.pending_originals.adopt(files, originals)
            while (
                self.pending_originals.pending(began - CREATION_WAIT_S) and time.monotonic() < began + CREATION_WAIT_S
            ):
                time.sleep(CREATION_POLL_S)
                self.pending_originals.adopt(files, originals)
        except Unavailable as error:
            log.error("%s: %s", error.reason, error.remedy)
        except Exception:
            # Whatever is wrong here, all others are put back.
            log.exception("what was made with values of this agent's a moment ago may keep them")
        return self.pending_originals.outcomes()

    def leave(self, files: KnobWriter) -> None:
        """The runtime believes of nobody that he has values of ours, and hears of us no more. Idempotent."""
        if self._plugin is not None:
            self._plugin.leave(files, self.pending_originals.pending(0.0))
            self._plugin.close()


def nri_socket(configured: str | None) -> Path | None:
    """The socket of the settings, or the usual one where it is; None where none is to be asked, or none is there."""
    if configured is not None:
        return Path(configured.removeprefix("unix://")) if configured else None
    return NRI_SOCKET if NRI_SOCKET.is_socket() else None


def _refresh_pods(loop: asyncio.AbstractEventLoop, pods: KubeletPodSource) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(pods.nudge)
