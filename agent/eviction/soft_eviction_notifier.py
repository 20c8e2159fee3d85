"""Notifies pods that request it (`pod_soft_evict_notify`) of soft thresholds by a file that they can mount.
A pod that mounts the directory can put anything there: only a regular file is written to, and links are not followed.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from agent.eviction.victims import wants_soft_eviction_notice
from api.eviction import EvictionEvent, EvictionEventReason, EvictionVictim
from api.pod import Pod
from api.units import NS_PER_S
from common.disk_writer import INLINE_WRITER, FileWriter

log = logging.getLogger(__name__)
NOTICE_FILE, FOLDER_SEPARATOR = "soft_eviction_notify", "@@__@@"
CREATE_INTERVAL_NS, CLEANUP_INTERVAL_NS, REPEAT_INTERVAL_NS = 60 * NS_PER_S, 600 * NS_PER_S, 600 * NS_PER_S
"""As in Katalyst: directories are created every minute and removed every ten. A notice is repeated after ten minutes."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class SoftEvictionNotifier:
    """A PodNotifier (agent.eviction.runner). Without a root directory (None) pods are notified by events only."""

    def __init__(
        self, root: Path | None, wall: Callable[[], float] = time.time, disk: FileWriter = INLINE_WRITER
    ) -> None:
        """`disk` runs everything that touches the directory."""
        self._root, self._wall, self._disk = root, wall, disk
        self._notified_ns: dict[tuple[str, str], int] = {}
        self._events: deque[EvictionEvent] = deque()
        self._make_ns: int | None = None
        self._clean_ns: int | None = None

    def run_cycle(self, victims: Iterable[EvictionVictim], pods: Sequence[Pod], now_ns: int) -> None:
        """Notify victims with `notify`; create and remove directories at intervals. Never raises for a disk error."""
        if self._root is not None and pods:
            self._disk.submit("folders", partial(self._keep, self._root, pods, now_ns))
        self._notified_ns = {
            key: at_ns for key, at_ns in self._notified_ns.items() if 0 <= now_ns - at_ns < REPEAT_INTERVAL_NS
        }
        for victim in victims:
            key = (victim.uid, victim.plugin)
            if not victim.notify or victim.dry_run or key in self._notified_ns:
                continue
            self._notified_ns[key] = now_ns
            self._disk.submit(" ".join(key), partial(self._notify, victim, now_ns))

    def outcomes(self) -> Sequence[EvictionEvent]:
        """Return the notifications since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def _notify(self, victim: EvictionVictim, now_ns: int) -> None:
        failure = "" if self._root is None else self._write(self._root / _folder_name(victim.pod), victim)
        reason = EvictionEventReason.NOT_NOTIFIED if failure else EvictionEventReason.NOTIFIED
        text = f"notify failed: {failure}" if failure else "notify pod successfully"
        message = f"{text}; reason: {victim.reason.text}"
        self._events.append(EvictionEvent(pod=victim.pod, reason=reason, message=message, at_ns=now_ns))

    def _write(self, folder: Path, victim: EvictionVictim) -> str:
        """Write the time and the reason; return the error, empty if there is none."""
        text = (
            f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(self._wall()))} {victim.plugin}: {victim.reason.text}\n"
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            inside = os.open(folder, _FOLDER_FLAGS)
            try:
                file = os.open(NOTICE_FILE, _FILE_FLAGS, 0o644, dir_fd=inside)
            finally:
                os.close(inside)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    return f"{folder / NOTICE_FILE} is no file"
                os.ftruncate(file, 0)
                os.write(file, text.encode())
            finally:
                os.close(file)
        except OSError as error:
            return f"{folder / NOTICE_FILE}: {error.strerror}"
        return ""

    def _keep(self, root: Path, pods: Sequence[Pod], now_ns: int) -> None:
        try:
            if self._make_ns is None or now_ns - self._make_ns >= CREATE_INTERVAL_NS:
                self._make_ns = now_ns
                for pod in pods:
                    if wants_soft_eviction_notice(pod):
                        (root / _folder_name(pod.key)).mkdir(parents=True, exist_ok=True)
            if self._clean_ns is None or now_ns - self._clean_ns >= CLEANUP_INTERVAL_NS:
                self._clean_ns = now_ns
                here = {_folder_name(pod.key) for pod in pods}
                for path in root.glob(f"*{FOLDER_SEPARATOR}*"):
                    if path.name not in here and path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            log.warning(
                "notices below %s cannot be written: %s; pods are notified of soft thresholds by events only",
                root,
                error,
            )


def _folder_name(pod: str) -> str:
    namespace, _, name = pod.partition("/")
    return f"{name}{FOLDER_SEPARATOR}{namespace}"
