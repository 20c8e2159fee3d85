"""Probes that load after their owner is up: one after another, in a thread, by one compiling child of low priority.

What is not loaded yet is there already, as a probe of the form `loading` that has seen nothing; what cannot be loaded says
why each time that it is read, and is of the form `absent` if the running kernel takes none. The child ends with the last
probe, so nothing of its memory stays.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from api.ports import Absent, Probe, Seen, Unavailable
from probes.loader import CHILD_PYTHON, Compiler, sharing

log = logging.getLogger(__name__)
LOADING = "loading"
ABSENT = "absent"
NICE = 10
"""Added to the nice value of the child: half a second of CPU per probe is not worth a millisecond of anybody's wait."""
NOTHING = Seen()


class Late:
    """A probe whose opening is somebody else's to do, at some time; until then it gives nothing."""

    def __init__(self, name: str, opener: Callable[[], Probe]) -> None:
        self.name = name
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
        try:
            probe = self._opener()
        except Unavailable as error:
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
                self._probe = probe
                return
        probe.close()

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:
        """What the probe has seen; nothing while it loads. Raises Unavailable where it could not be opened."""
        if self._refusal is not None:
            raise self._refusal
        return NOTHING if self._probe is None else self._probe.read(live, complete=complete)

    def problem(self) -> Unavailable | None:
        """What the probe could not count although it works."""
        return None if self._probe is None else self._probe.problem()

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
        self._compiler = Compiler(child_python, nice=NICE)
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
        with self._compiler, sharing(self._compiler):
            for probe in self.probes:
                if self._closed.is_set():
                    return
                probe.open()
