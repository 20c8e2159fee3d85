"""Lifetime of the NRI plugin: opened before the first cycle, silenced and restored at shutdown.
Without a kubelet or an NRI socket there is no plugin, and its modules are not imported, because protobuf costs memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from agent.qrm.actuator.pending_originals import PendingOriginals
from api.decision import ActMode, Outcome
from api.interfaces import HealthReporter, Unavailable

if TYPE_CHECKING:
    from agent.advisor.preview import PreviewInputs
    from agent.config.config import AgentConfig
    from agent.qrm.actuator.originals import OriginalsJournal
    from agent.qrm.actuator.writer import KnobWriter
    from agent.sensors.cgroup.hierarchy import Hierarchy
    from agent.sensors.pods.kubelet_pods import KubeletPodSource
    from agent.sensors.pods.pod_spec import PodParsingContext

log = logging.getLogger("dioptase")
NRI_SOCKET = Path("/var/run/nri/nri.sock")
CREATION_WAIT_S, CREATION_POLL_S = 2.0, 0.05
"""Time after an answer for which the shutdown waits for the container's cgroup, and the poll interval. For later cgroups the
runtime is sent the original values."""


class NriLifecycle:
    """The NRI plugin, if there is one. Call `start` when inputs exist, `end` before restoring originals, `leave` after it."""

    def __init__(
        self,
        config: AgentConfig,
        act: ActMode,
        pods: KubeletPodSource | None,
        parsing: PodParsingContext,
        hierarchy: Hierarchy,
        state_dir: Path,
    ) -> None:
        """`pods` is None if they do not come from a kubelet: then there is no plugin."""
        self.pending_originals = PendingOriginals()
        self._inputs: Callable[[], PreviewInputs | None] = lambda: None
        self._plugin = None
        self._keeps_values = False
        socket = nri_socket(config.kubelet.nri_socket)
        if act is not ActMode.ON or pods is None or socket is None:
            return
        from agent.nri.adjustments import NriContext  # noqa: PLC0415 - protobuf
        from agent.nri.plugin import NriPlugin  # noqa: PLC0415
        from agent.nri.signed_annotation import open_signed_annotations  # noqa: PLC0415

        loop = asyncio.get_running_loop()
        context = NriContext(
            preview_inputs=self._latest,
            listed=pods.listed,
            wake=lambda: _refresh_pods(loop, pods),
            parsing=parsing,
            hierarchy=hierarchy,
            pending_originals=self.pending_originals,
        )
        self._plugin = NriPlugin(socket, context, open_signed_annotations(state_dir), config.kubelet.nri_patience_s)

    @property
    def reporters(self) -> tuple[HealthReporter, ...]:
        """Health of the NRI connection."""
        return () if self._plugin is None else (self._plugin.source,)

    @property
    def answers(self) -> Mapping[str, int]:
        """Number of the runtime's requests by answer. Any thread may read it."""
        return {} if self._plugin is None else self._plugin.counts

    def _latest(self) -> PreviewInputs | None:
        return self._inputs()

    def start(self, preview_inputs: Callable[[], PreviewInputs | None]) -> None:
        """Connect to the runtime and answer its requests."""
        self._inputs = preview_inputs
        if self._plugin is not None:
            self._plugin.start()

    def end(self, files: KnobWriter, originals: OriginalsJournal | None) -> tuple[Outcome, ...]:
        """Stop adjusting containers, and journal the originals of those already adjusted, including containers that the runtime
        is creating now. Return their outcomes since the latest cycle. Idempotent."""
        if self._plugin is not None:
            self._plugin.stop_adjusting()
        if originals is None:
            return ()
        start_s = time.monotonic()
        try:
            self.pending_originals.adopt(files, originals)
            while (
                self.pending_originals.pending(start_s - CREATION_WAIT_S)
                and time.monotonic() < start_s + CREATION_WAIT_S
            ):
                time.sleep(CREATION_POLL_S)
                self.pending_originals.adopt(files, originals)
        except Unavailable as error:
            log.error("%s: %s", error.reason, error.remedy)
        except Exception:
            # The originals in the journal must be restored in any case.
            log.exception("NRI: containers created during the shutdown may keep values of this agent")
        return self.pending_originals.outcomes()

    def keep_values(self) -> None:
        """Let `leave` restore nothing, because a successor adopts the values.

        Originals of containers whose cgroup does not exist yet are in annotations, which the runtime shows the successor."""
        self._keeps_values = True

    def leave(self, files: KnobWriter) -> None:
        """Tell the runtime to restore every container's own limits, then unregister the plugin. Idempotent."""
        if self._plugin is not None:
            if not self._keeps_values:
                self._plugin.leave(files, self.pending_originals.pending(0.0))
            self._plugin.close()


def nri_socket(configured: str | None) -> Path | None:
    """Return the configured socket, else the default one if it exists; None if NRI is switched off or absent."""
    if configured is not None:
        return Path(configured.removeprefix("unix://")) if configured else None
    return NRI_SOCKET if NRI_SOCKET.is_socket() else None


def _refresh_pods(loop: asyncio.AbstractEventLoop, pods: KubeletPodSource) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(pods.request_poll)
