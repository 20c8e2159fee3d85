"""Loads probes after the agent is up: one after another, in a thread, by one compiling child of low priority.
A probe that is not loaded yet has the form `loading` and no samples; one that cannot be loaded raises its reason on
each read and has the form `absent` if the running kernel supports no form of it. A probe whose child was killed is
tried once more later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from api.interfaces import KernelFeatureAbsent, Probe, ProbeReading, Unavailable
from api.snapshot import ABSENT
from probes.loader import CHILD_PYTHON, Compiler, sharing
from probes.remedies import CompilerLost

log = logging.getLogger(__name__)
LOADING = "loading"
CHILD_NICE = 10
"""Nice value of the child: half a second of CPU per probe must not delay other processes."""
COMPILE_TIMEOUT_S = 300.0
"""Timeout of one probe: a low-priority child is slow on a full node."""
RETRY_S = 60.0
NO_SAMPLES = ProbeReading()


class DeferredProbe:
    """A probe that is opened later, by `open`; until then its readings are empty."""

    def __init__(self, name: str, opener: Callable[[], Probe]) -> None:
        self.name = name
        self.retriable = False
        """Whether the latest `open` failed for a temporary reason."""
        self._opener = opener
        self._probe: Probe | None = None
        self._refusal: Unavailable | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def form(self) -> str:
        probe, refusal = self._probe, self._refusal
        if probe is not None:
            return probe.form
        if refusal is None:
            return LOADING
        return ABSENT if isinstance(refusal, KernelFeatureAbsent) else ""

    def open(self) -> None:
        """Open the probe, or store the reason why that fails. Never raises."""
        self.retriable = False
        try:
            probe = self._opener()
        except Unavailable as error:
            self.retriable = isinstance(error, CompilerLost)
            self._refusal = error
            return
        except Exception as error:
            log.exception("probe %s cannot be opened", self.name)
            self._refusal = Unavailable(
                f"{type(error).__name__}: {error}", "this is a bug: report it with the agent's log"
            )
            return
        with self._lock:
            if not self._closed:
                self._probe, self._refusal = probe, None
                return
        probe.close()

    def announce_retry(self) -> None:
        """Add the coming retry to the remedy."""
        if self._refusal is not None:
            remedy = f"{self._refusal.remedy}, or wait for the retry after {RETRY_S:g} s"
            self._refusal = Unavailable(self._refusal.reason, remedy)

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Return the probe's reading; an empty one while it loads. Raises Unavailable if it could not be opened."""
        # Each is read once: the loading thread and `close` replace them meanwhile.
        refusal, probe = self._refusal, self._probe
        if refusal is not None:
            raise refusal
        return NO_SAMPLES if probe is None else probe.read(live, complete=complete)

    def problem(self) -> Unavailable | None:
        """Return the problem of a working probe."""
        probe = self._probe
        return None if probe is None else probe.problem()

    @property
    def lost_events(self) -> int | None:
        probe = self._probe
        return None if probe is None else probe.lost_events

    def close(self) -> None:
        """Detach from the kernel, now or as soon as the probe is opened. Idempotent."""
        with self._lock:
            self._closed = True
            probe, self._probe = self._probe, None
            self._refusal = self._refusal or Unavailable(f"the probe {self.name} is closed", "open it again")
        if probe is not None:
            probe.close()


class DeferredLoader:
    """Loads probes in a thread of its own, between `start` and `close`."""

    def __init__(self, openers: Sequence[tuple[str, Callable[[], Probe]]], child_python: Path = CHILD_PYTHON) -> None:
        self.probes = tuple(DeferredProbe(name, opener) for name, opener in openers)
        self._child_python = child_python
        self._compiler = Compiler(child_python, nice=CHILD_NICE, timeout_s=COMPILE_TIMEOUT_S)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._load, name="probes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Abort the loading and close every probe. Idempotent."""
        self._closed.set()
        self._compiler.end()
        if self._thread.is_alive():
            self._thread.join()
        for probe in self.probes:
            probe.close()

    def _load(self) -> None:
        self._open(self.probes)
        retriable = [probe for probe in self.probes if probe.retriable]
        for probe in retriable:
            probe.announce_retry()
        if retriable and not self._closed.wait(RETRY_S):
            self._compiler = Compiler(self._child_python, nice=CHILD_NICE, timeout_s=COMPILE_TIMEOUT_S)
            self._open(retriable)

    def _open(self, probes: Sequence[DeferredProbe]) -> None:
        with self._compiler, sharing(self._compiler):
            for probe in probes:
                if self._closed.is_set():
                    return
                probe.open()
