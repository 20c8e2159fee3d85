"""Which of the kubelet's own resource managers hand out CPUs and memory: read from the files in which it keeps that.

A static CPU manager gives containers CPUs of their own, and writes the cpuset of every other container as well; a static
memory manager binds containers to NUMA nodes. Nobody here writes over either: the kubelet comes back every ten seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent.smallfile import read_small
from api.cpus import parse_cpu_list
from api.facts import KubeletManagers
from api.ports import Seen, Unavailable

CPU_STATE, MEMORY_STATE = "cpu_manager_state", "memory_manager_state"
NONE = "none"
LARGEST_BYTES = 4 << 20
_REMEDY = (
    "write `cpuManagerPolicy: none` in the kubelet's configuration, and remove {path} with the kubelet stopped; or leave it, "
    "and have advisor.policy latency, which needs no cpusets"
)


class _Cpu(msgspec.Struct, frozen=True, rename="camel"):
    policy_name: str
    entries: dict[str, dict[str, str]] | None = None


class _Memory(msgspec.Struct, frozen=True, rename="camel"):
    policy_name: str
    entries: dict[str, dict[str, Any]] | None = None


def read(root: Path) -> KubeletManagers:
    """What the files below the kubelet's directory say; a manager without a file is off. Raises Unavailable for one that
    cannot be read, and where there is no such directory."""
    if not root.is_dir():
        raise _unreadable(root, "there is no such directory")
    cpu = _state(root / CPU_STATE, _Cpu)
    memory = _state(root / MEMORY_STATE, _Memory)
    exclusive = {}
    for uid, containers in (cpu.entries or {}).items() if cpu is not None else ():
        try:
            exclusive[uid] = {name: parse_cpu_list(cpus) for name, cpus in containers.items()}
        except ValueError as error:
            raise _unreadable(root / CPU_STATE, str(error)) from None
    return KubeletManagers(
        cpu=NONE if cpu is None else cpu.policy_name.lower(),
        memory=NONE if memory is None else memory.policy_name.lower(),
        exclusive=exclusive,
        bound=frozenset(memory.entries or {}) if memory is not None else frozenset(),
    )


class ManagersProbe:
    """A Probe (api.ports) that gives the node its `kubelet`; told as a problem where it stands in the policy's way."""

    name, lost_events = "kubelet-managers", None

    def __init__(self, root: Path, *, wants_cpusets: bool) -> None:
        self._root, self._wants = root, wants_cpusets
        self._signature: tuple[tuple[int, ...], ...] | None = None
        self._found: KubeletManagers | None = None
        self._unread: Unavailable | None = None

    @property
    def form(self) -> str:
        """Of a snapshot's detail: the policies."""
        return "unknown" if self._found is None else f"cpu {self._found.cpu}, memory {self._found.memory}"

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:  # noqa: ARG002 - a Probe's
        """The files, if they are other than they were. While they cannot be read, what was known holds."""
        signature = tuple(_signature(self._root / name) for name in (CPU_STATE, MEMORY_STATE))
        if signature != self._signature:
            try:
                self._found, self._signature, self._unread = read(self._root), signature, None
            except Unavailable as error:
                self._unread = error
        return Seen(node={"kubelet": self._found})

    def problem(self) -> Unavailable | None:
        """Why nothing is known of them; or that cpusets are the kubelet's, where the policy would have them."""
        if self._unread is not None:
            # Only who writes cpusets needs to know: the directory has the secrets of all pods, so that few mount it.
            return self._unread if self._wants or self._root.is_dir() else None
        if self._found is None or not (self._wants and self._found.cpusets):
            return None
        own = sum(len(containers) for containers in self._found.exclusive.values())
        return Unavailable(
            f"the kubelet's CPU manager is static: cpusets are its own, and {own} containers have CPUs to themselves; none is "
            "written here, and reclaimed pods are held by priority and quota",
            _REMEDY.format(path=self._root / CPU_STATE),
        )

    def close(self) -> None:
        """Nothing is kept open."""


def _signature(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _state(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(read_small(path, LARGEST_BYTES), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from None


def _unreadable(path: Path, why: str) -> Unavailable:
    return Unavailable(
        f"{path} cannot be read: {why[:200]}",
        "let the agent see the kubelet's directory, and name it in kubelet.rootDir; or see the kubelet's log",
    )
