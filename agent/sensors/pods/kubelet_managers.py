"""Determines whether the kubelet's CPU and memory managers are static, from /configz and from its state files. A static
CPU manager writes the cpuset of every container and repeats that every ten seconds, so the agent must not write cpusets
then. Where neither source can be read, the managers count as possibly static."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent.sensors.pods.kubelet_configuration import MANAGER_OFF, KubeletConfigPoller, KubeletConfiguration
from api.cpu import parse_cpu_list
from api.interfaces import ProbeReading, Unavailable
from api.snapshot import KubeletManagers
from common.files import read_small_file

CPU_STATE_FILE, MEMORY_STATE_FILE = "cpu_manager_state", "memory_manager_state"
POLICY_UNKNOWN = "unknown"
MAX_STATE_BYTES = 4 << 20
_REMEDY = (
    "write `cpuManagerPolicy: none` in the kubelet's configuration, and remove {path} with the kubelet stopped; or set "
    "advisor.policy: latency, which needs no cpusets"
)


class _Cpu(msgspec.Struct, frozen=True, rename="camel"):
    policy_name: str
    entries: dict[str, dict[str, str]] | None = None


class _Memory(msgspec.Struct, frozen=True, rename="camel"):
    policy_name: str
    entries: dict[str, dict[str, Any]] | None = None


def combine_managers(configz: KubeletConfiguration | None, state_files: KubeletManagers | None) -> KubeletManagers:
    """Return the managers by `/configz` and by the state files. A manager counts as on if either says so: leaving
    cpusets alone costs little, competing with the kubelet for them costs much."""
    if configz is None:
        return state_files or KubeletManagers(cpu=POLICY_UNKNOWN, memory=POLICY_UNKNOWN)
    cpu, memory = configz.cpu_manager_policy.lower(), configz.memory_manager_policy.lower()
    if state_files is None:
        return KubeletManagers(cpu=cpu, memory=memory)
    return msgspec.structs.replace(
        state_files,
        cpu=state_files.cpu if cpu == MANAGER_OFF else cpu,
        memory=state_files.memory if memory == MANAGER_OFF else memory,
    )


def read_manager_state(root: Path) -> KubeletManagers:
    """Return the managers by the files in the kubelet's directory; without a memory manager there is no such file.

    Raises Unavailable for an unreadable file, a missing directory or a missing CPU manager file.
    """
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
        memory=MANAGER_OFF if memory is None else memory.policy_name.lower(),
        exclusive=exclusive,
        bound=frozenset(memory.entries or {}) if memory is not None else frozenset(),
    )


class KubeletManagersProbe:
    """A Probe (api.interfaces) of the node's `kubelet` field; reports a problem if the managers prevent the policy."""

    name, lost_events = "kubelet-managers", None

    def __init__(self, root: Path, poller: KubeletConfigPoller, *, needs_cpusets: bool) -> None:
        self._root, self._poller, self._needs_cpusets = root, poller, needs_cpusets
        self._signature: tuple[tuple[int, ...], ...] | None = None
        self._managers: KubeletManagers | None = None
        self._unreadable: Unavailable | None = None

    @property
    def form(self) -> str:
        """The policies, as the detail of a snapshot's source."""
        managers = combine_managers(self._poller.configuration, self._managers)
        return POLICY_UNKNOWN if managers.cpu == POLICY_UNKNOWN else f"cpu {managers.cpu}, memory {managers.memory}"

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - a Probe's
        """Read the files if they changed. While they cannot be read, the last values stay."""
        signature = tuple(_signature(self._root / name) for name in (CPU_STATE_FILE, MEMORY_STATE_FILE))
        if signature != self._signature:
            try:
                self._managers, self._signature, self._unreadable = read_manager_state(self._root), signature, None
            except Unavailable as error:
                self._unreadable = error
        return ProbeReading(node={"kubelet": combine_managers(self._poller.configuration, self._managers)})

    def problem(self) -> Unavailable | None:
        """Return why the managers are unknown, or that the kubelet owns cpusets which the policy needs."""
        managers = combine_managers(self._poller.configuration, self._managers)
        if self._needs_cpusets and managers.cpu == POLICY_UNKNOWN:
            reasons = [error.reason for error in (self._poller.problem, self._unreadable) if error is not None]
            return Unavailable(
                f"it is unknown whether the kubelet's CPU manager is static: {'; '.join(reasons)}. No cpuset is written, and "
                "reclaimed pods are limited by priority and quota",
                "give the agent `get` of nodes/configz or nodes/proxy, or mount the kubelet's directory (kubelet.rootDir)",
            )
        if self._needs_cpusets and managers.manages_cpusets:
            count = sum(len(containers) for containers in managers.exclusive.values())
            alone = f"{count} containers have exclusive CPUs"
            return Unavailable(
                "the kubelet's CPU manager is static: it owns all cpusets, and "
                f"{alone if self._managers else 'which containers have exclusive CPUs is unknown'}; none is "
                "written here, and reclaimed pods are limited by priority and quota",
                _REMEDY.format(path=self._root / CPU_STATE_FILE),
            )
        # The directory holds the secrets of all pods, so it is rarely mounted; if it is, it should be readable.
        return self._unreadable if self._unreadable is not None and self._root.is_dir() else None

    def close(self) -> None:
        pass


def _signature(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


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
        "mount the kubelet's directory, and set kubelet.rootDir to it; or see the kubelet's log",
    )
