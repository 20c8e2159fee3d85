"""Determines whether the kubelet's CPU and memory managers are static, from /configz and from its state files.
A static CPU manager writes the cpuset of every container and repeats that every ten seconds, so the agent must not
write cpusets then. Where neither source can be read, the managers count as possibly static.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent.sensors.pods.kubelet_client import KubeletClient
from api.cpu import parse_cpu_list
from api.interfaces import ProbeReading, Unavailable
from api.measurements import KubeletManagers
from common.files import read_small_file

CPU_STATE_FILE, MEMORY_STATE_FILE = "cpu_manager_state", "memory_manager_state"
POLICY_NONE, POLICY_UNKNOWN = "none", "unknown"
POLL_INTERVAL_S = 10.0
"""A kubelet that was started anew may have other managers."""
MAX_STATE_BYTES = 4 << 20
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


class KubeletManagerPolicies(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a kubelet's `/configz` says of them."""

    cpu_manager_policy: str
    memory_manager_policy: str = POLICY_NONE


class _Answer(msgspec.Struct, frozen=True):
    kubeletconfig: KubeletManagerPolicies


def parse_configz(answer: bytes) -> KubeletManagerPolicies:
    """Raises Unavailable where that is no answer."""
    try:
        return msgspec.json.decode(answer, type=_Answer).kubeletconfig
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unavailable(f"the kubelet's /configz is not what it should be: {error}", "see its version") from None


class KubeletConfigPoller:
    """The kubelet, asked for its configuration now and then; what it said last stands while it cannot be asked."""

    def __init__(self, kubelet: KubeletClient) -> None:
        """`kubelet` at CONFIGZ."""
        self._kubelet = kubelet
        self.said: KubeletManagerPolicies | None = None
        self.problem: Unavailable | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Once. Never raises for what the kubelet does."""
        try:
            self.said, self.problem = parse_configz(await self._kubelet.ask()), None
        except Unavailable as error:
            self.problem = error


def combine_managers(configz: KubeletManagerPolicies | None, state_files: KubeletManagers | None) -> KubeletManagers:
    """What the kubelet says and what its files do. Where only one of the two says that a manager is on, it is on: to leave
    lists of CPUs alone that a kubelet does not write loses little, to fight over them much."""
    if configz is None:
        return state_files or KubeletManagers(cpu=POLICY_UNKNOWN, memory=POLICY_UNKNOWN)
    cpu, memory = configz.cpu_manager_policy.lower(), configz.memory_manager_policy.lower()
    if state_files is None:
        return KubeletManagers(cpu=cpu, memory=memory)
    return msgspec.structs.replace(
        state_files,
        cpu=state_files.cpu if cpu == POLICY_NONE else cpu,
        memory=state_files.memory if memory == POLICY_NONE else memory,
    )


def read_manager_state(root: Path) -> KubeletManagers:
    """What the files below the kubelet's directory say; a kubelet that has no memory manager has no file of it. Raises
    Unavailable for one that cannot be read, and where the directory or the CPU manager's file is missing."""
    if not root.is_dir():
        raise _unreadable(root, "there is no such directory")
    cpu = _decode_state(root / CPU_STATE_FILE, _Cpu)
    if cpu is None:
        raise _unreadable(root / CPU_STATE_FILE, "there is no such file")
    memory = _decode_state(root / MEMORY_STATE_FILE, _Memory)
    exclusive = {}
    for uid, containers in (cpu.entries or {}).items():
        try:
            exclusive[uid] = {name: parse_cpu_list(cpus) for name, cpus in containers.items()}
        except ValueError as error:
            raise _unreadable(root / CPU_STATE_FILE, str(error)) from None
    return KubeletManagers(
        cpu=cpu.policy_name.lower(),
        memory=POLICY_NONE if memory is None else memory.policy_name.lower(),
        exclusive=exclusive,
        bound=frozenset(memory.entries or {}) if memory is not None else frozenset(),
    )


class KubeletManagersProbe:
    """A Probe (api.interfaces) that gives the node its `kubelet`; told as a problem where it stands in the policy's way."""

    name, lost_events = "kubelet-managers", None

    def __init__(self, root: Path, asking: KubeletConfigPoller, *, wants_cpusets: bool) -> None:
        self._root, self._asking, self._wants = root, asking, wants_cpusets
        self._signature: tuple[tuple[int, ...], ...] | None = None
        self._found: KubeletManagers | None = None
        self._unread: Unavailable | None = None

    @property
    def form(self) -> str:
        """Of a snapshot's detail: the policies."""
        found = combine_managers(self._asking.said, self._found)
        return POLICY_UNKNOWN if found.cpu == POLICY_UNKNOWN else f"cpu {found.cpu}, memory {found.memory}"

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - a Probe's
        """The files, if they are other than they were. While they cannot be read, what was known holds."""
        signature = tuple(_signature(self._root / name) for name in (CPU_STATE_FILE, MEMORY_STATE_FILE))
        if signature != self._signature:
            try:
                self._found, self._signature, self._unread = read_manager_state(self._root), signature, None
            except Unavailable as error:
                self._unread = error
        return ProbeReading(node={"kubelet": combine_managers(self._asking.said, self._found)})

    def problem(self) -> Unavailable | None:
        """Why nothing is known of them; or that cpusets are the kubelet's, where the policy would have them."""
        found = combine_managers(self._asking.said, self._found)
        if self._wants and found.cpu == POLICY_UNKNOWN:
            whys = [error.reason for error in (self._asking.problem, self._unread) if error is not None]
            return Unavailable(
                f"nobody tells whether the kubelet's CPU manager is static: {'; '.join(whys)}. No list of CPUs is written, and "
                "reclaimed pods are held by priority and quota",
                "give the agent `get` of nodes/configz or nodes/proxy, or let it see the kubelet's directory (kubelet.rootDir)",
            )
        if self._wants and found.manages_cpusets:
            own = sum(len(containers) for containers in found.exclusive.values())
            alone = f"{own} containers have CPUs to themselves"
            return Unavailable(
                "the kubelet's CPU manager is static: cpusets are its own, and "
                f"{alone if self._found else 'which containers have CPUs to themselves is not known'}; none is "
                "written here, and reclaimed pods are held by priority and quota",
                _REMEDY.format(path=self._root / CPU_STATE_FILE),
            )
        # The directory has the secrets of all pods, so that few mount it; who does wants it read.
        return self._unread if self._unread is not None and self._root.is_dir() else None

    def close(self) -> None:
        """Nothing is kept open."""


def _signature(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _decode_state(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(read_small_file(path, MAX_STATE_BYTES), type=kind)
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
