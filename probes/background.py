"""Probes that load after their owner is up: one after another, in a thread, by one compiling child of low priority.

What is not loaded yet is there already, as a probe of the form `loading` that has seen nothing; what cannot be loaded says
why each time that it is read, and is of the form `absent` if the running kernel takes none. The child ends with the last
probe, so nothing of its memory stays. Where it was lost before, the probe that it had in hand is tried once more, a while
later: a node that starts has less memory to give than one that runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from api.ports import Absent, Probe, Seen, Unavailable
from probes.loader import CHILD_PYTHON, Compiler, sharing
from probes.remedies import Lost

log = logging.getLogger(__name__)
LOADING = "loading"
ABSENT = "absent"
NICE = 10
"""Added to the nice value of the child: half a second of CPU per probe is not worth a millisecond of anybody's wait."""
PATIENCE_S = 300.0
"""For one probe: who yields to everybody is slow on a node that is full, and that one needs its probes most."""
AGAIN_S = 60.0
NOTHING = Seen()


class Late:
    """A probe whose opening is somebody else's to do, at some time; until then it gives nothing."""

    def __init__(self, name: str, opener: Callable[[], Probe]) -> None:
        self.name = name
        self.lost = False
        """Whether the latest `open` failed for a reason that may pass."""
        self._opener = opener
        self._probe: Probe | None = None
        self._refusal: Unavailable | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def form(self) -> str:
        if self._probe is not None:
            return self._probe.form
        if self._refusal is None:
            return LOADING
        return ABSENT if isinstance(self._refusal, Absent) else ""

    def open(self) -> None:
        """Open it, or remember why that cannot be. Never raises."""
        self.lost = False
        try:
            probe = self._opener()
        except Unavailable as error:
            self.lost = isinstance(error, Lost)
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

    def wait(self) -> None:
        """Say that it is tried once more."""
        if self._refusal is not None:
            remedy = f"{self._refusal.remedy}, or wait: it is tried once more after {AGAIN_S:g} s"
            self._refusal = Unavailable(self._refusal.reason, remedy)

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:
        """What the probe has seen; nothing while it loads. Raises Unavailable where it could not be opened."""
        if self._refusal is not None:
            raise self._refusal
        return NOTHING if self._probe is None else self._probe.read(live, complete=complete)

    def problem(self) -> Unavailable | None:
        """What the probe could not count although it works."""
        return None if self._probe is None else self._probe.problem()

    @property
    def lost_events(self) -> int | None:
        return None if self._probe is None else self._probe.lost_events

    def close(self) -> None:
        """Detach from the kernel, now or as soon as it is opened. Idempotent."""
        with self._lock:
            self._closed = True
            probe, self._probe = self._probe, None
            self._refusal = self._refusal or Unavailable(f"the probe {self.name} is closed", "open it again")
        if probe is not None:
            probe.close()


class Background:
    """Loads probes in a thread of its own, from `start` until all are open or `close`."""

    def __init__(self, openers: Sequence[tuple[str, Callable[[], Probe]]], child_python: Path = CHILD_PYTHON) -> None:
        self.probes = tuple(Late(name, opener) for name, opener in openers)
        self._child_python = child_python
        self._compiler = Compiler(child_python, nice=NICE, timeout_s=PATIENCE_S)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._load, name="probes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the loading, whatever it does, and close every probe. Idempotent."""
        self._closed.set()
        self._compiler.end()
        if self._thread.is_alive():
            self._thread.join()
        for probe in self.probes:
            probe.close()

    def _load(self) -> None:
        self._open(self.probes)
        lost = [probe for probe in self.probes if probe.lost]
        for probe in lost:
            probe.wait()
        if lost and not self._closed.wait(AGAIN_S):
            self._compiler = Compiler(self._child_python, nice=NICE, timeout_s=PATIENCE_S)
            self._open(lost)

    def _open(self, probes: Sequence[Late]) -> None:
        with self._compiler, sharing(self._compiler):
            for probe in probes:
                if self._closed.is_set():
                    return
                probe.open()
