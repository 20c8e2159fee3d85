"""Tells pods of soft thresholds that ask for it (`pod_soft_evict_notify`): a file in a folder of each, which it may mount.

The folder is made before there is anything to tell, and goes with its pod. Who has mounted one may put anything there: what is
no file is not written to.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from agent.eviction.choosing import asks_to_be_told
from agent.eviction.situation import NS_PER_S
from api.evictions import KillEvent, KillReason, Victim
from api.pods import Pod

log = logging.getLogger(__name__)
FILE, SEPARATOR = "soft_eviction_notify", "@@__@@"
MAKE_NS, CLEAN_NS, AGAIN_NS = 60 * NS_PER_S, 600 * NS_PER_S, 600 * NS_PER_S
"""Katalyst's: folders are made every minute and cleaned every ten. One trouble is told of again after ten, too."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Notifier:
    """Without a root (None) only events tell."""

    def __init__(self, root: Path | None, wall: Callable[[], float] = time.time) -> None:
        self._root, self._wall = root, wall
        self._told: dict[tuple[str, str], int] = {}
        self._events: list[KillEvent] = []
        self._make_ns: int | None = None
        self._clean_ns: int | None = None

    def turn(self, victims: Iterable[Victim], pods: Sequence[Pod], now_ns: int) -> None:
        """Tell those who are to be told; now and then make and clean folders. Never raises for what the disk does."""
        if self._root is not None and pods:
            self._keep(self._root, pods, now_ns)
        self._told = {key: at_ns for key, at_ns in self._told.items() if 0 <= now_ns - at_ns < AGAIN_NS}
        for victim in victims:
            key = (victim.uid, victim.plugin)
            if not victim.notify or victim.dry_run or key in self._told:
                continue
            self._told[key] = now_ns
            failure = "" if self._root is None else self._write(self._root / _folder(victim.pod), victim)
            reason = KillReason.NOT_NOTIFIED if failure else KillReason.NOTIFIED
            text = f"notify failed: {failure}" if failure else "notify pod successfully"
            message = f"{text}; reason: {victim.verdict.text}"
            self._events.append(KillEvent(pod=victim.pod, reason=reason, message=message, at_ns=now_ns))

    def outcomes(self) -> Sequence[KillEvent]:
        """Who was told since the last call."""
        events, self._events = self._events, []
        return events

    def _write(self, folder: Path, victim: Victim) -> str:
        """The time and the reason; why not, where it cannot be."""
        text = (
            f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(self._wall()))} {victim.plugin}: {victim.verdict.text}\n"
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            inside = os.open(folder, _FOLDER)
            try:
                file = os.open(FILE, _OPEN, 0o644, dir_fd=inside)
            finally:
                os.close(inside)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    return f"{folder / FILE} is no file"
                os.ftruncate(file, 0)
                os.write(file, text.encode())
            finally:
                os.close(file)
        except OSError as error:
            return f"{folder / FILE}: {error.strerror}"
        return ""

    def _keep(self, root: Path, pods: Sequence[Pod], now_ns: int) -> None:
        try:
            if self._make_ns is None or now_ns - self._make_ns >= MAKE_NS:
                self._make_ns = now_ns
                for pod in pods:
                    if asks_to_be_told(pod):
                        (root / _folder(pod.key)).mkdir(parents=True, exist_ok=True)
            if self._clean_ns is None or now_ns - self._clean_ns >= CLEAN_NS:
                self._clean_ns = now_ns
                here = {_folder(pod.key) for pod in pods}
                for path in root.glob(f"*{SEPARATOR}*"):
                    if path.name not in here and path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            log.warning("%s cannot be kept: %s; pods are told of soft thresholds by events alone", root, error)


def _folder(pod: str) -> str:
    namespace, _, name = pod.partition("/")
    return f"{name}{SEPARATOR}{namespace}"
