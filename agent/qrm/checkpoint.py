"""The CPU side's state on disk: Katalyst's cpu_plugin_state with a version and a checksum that can be checked.

One JSON object in Katalyst's keys (see agent/qrm/placing/state.py), replaced as a whole, written only when it says
something new. A file that is not exactly what was written is set aside as NAME.damaged-N and never half-used; the state is
then made anew from the cgroups' own cpusets (`rebuild`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from agent.durable import replace_file, set_aside
from agent.qrm.placing.state import CpuState, reboot
from agent.sealed import Damaged, sealed, unsealed
from agent.smallfile import read_small
from api.cpus import parse_cpu_list
from api.ports import Unavailable

VERSION = 1
FILE_NAME = "cpu_plugin_state"
LARGEST_BYTES = 64 << 20


class _File(CpuState, frozen=True, kw_only=True):
    version: int
    boot_id: str
    checksum: str


def encode_state(state: CpuState, boot_id: str) -> bytes:
    """The file for this state."""
    return sealed(_File(version=VERSION, boot_id=boot_id, checksum="", **msgspec.structs.asdict(state)))


def decode_state(data: bytes) -> tuple[str, CpuState]:
    """Boot id and state of a file. Raises Damaged unless every byte is as `encode_state` wrote it."""
    file = unsealed(data, _File, VERSION)
    state = CpuState(**{name: getattr(file, name) for name in CpuState.__struct_fields__})
    try:
        for entry in state.pod_entries.values():
            for item in entry.values():
                parse_cpu_list(item.allocation_result)
    except ValueError as error:
        raise Damaged(f"it cannot be read: {error}") from None
    return file.boot_id, state


class Checkpoint:
    """The file in a state directory that this process has locked. `messages` tells a person what was found wrong with it."""

    def __init__(self, state_dir: Path, boot_id: str) -> None:
        self.path = state_dir / FILE_NAME
        self.messages: tuple[str, ...] = ()
        self._boot_id = boot_id
        self._saved: CpuState | None = None

    def load(self, now_ns: int) -> CpuState | None:
        """What was saved last; None where there is nothing that can be trusted, see `messages`. Raises Unavailable."""
        try:
            boot_id, state = decode_state(read_small(self.path, LARGEST_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(
                f"the state of CPUs cannot be read from {self.path}: {error.strerror}",
                "make the file readable for this user",
            ) from None
        except Damaged as error:
            self._set_aside(str(error))
            return None
        if boot_id != self._boot_id:
            return reboot(state, now_ns)
        self._saved = _worth_saving(state)
        return state

    def save(self, state: CpuState) -> bool:
        """Have it on disk when it returns; False where the file says so already. Raises Unavailable."""
        worth = _worth_saving(state)
        if worth == self._saved:
            return False
        try:
            replace_file(self.path, encode_state(state, self._boot_id))
        except OSError as error:
            raise Unavailable(
                f"the state of CPUs cannot be written to {self.path}: {error.strerror}",
                f"make room in {self.path.parent} and make it writable, or choose another with --state-dir",
            ) from None
        self._saved = worth
        return True

    def _set_aside(self, reason: str) -> None:
        aside = set_aside(self.path, reason)
        self.messages = (
            f"{self.path} was damaged: {reason}. It is kept as {aside}; who has which CPUs was read from the cgroups instead",
        )


def _worth_saving(state: CpuState) -> CpuState:
    # Headroom is an input that comes anew with each round; a write for each of its changes would be one a second.
    return msgspec.structs.replace(state, numa_headroom={})
