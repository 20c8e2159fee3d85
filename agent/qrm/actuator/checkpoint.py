"""Saves and loads the CPU state on disk: Katalyst's `cpu_plugin_state` with a version and a checksum.
The file is replaced atomically, only when its content changes, and by the disk thread of the agent. A damaged file
is set aside as NAME.damaged-N and never used in part; the state is then rebuilt from the cgroups' cpusets.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from agent.qrm.cpuset.state import CpusetState, state_after_reboot
from api.cpu import parse_cpu_list
from api.interfaces import Unavailable
from common import state_file
from common.disk_writer import INLINE_WRITER, FileWriter
from common.files import read_small_file
from common.state_file import StateFileDamaged, quarantine_file, replace_file, write_failure

VERSION = 1
FILE_NAME = "cpu_plugin_state"
MAX_FILE_BYTES = 64 << 20


class _File(CpusetState, frozen=True, kw_only=True):
    version: int
    boot_id: str
    checksum: str


def encode_state(state: CpusetState, boot_id: str) -> bytes:
    """Return the content of the file for this state."""
    return state_file.encode_state(
        _File(version=VERSION, boot_id=boot_id, checksum="", **msgspec.structs.asdict(state))
    )


def decode_state(data: bytes) -> tuple[str, CpusetState]:
    """Return boot id and state of a file. Raises StateFileDamaged unless every byte is as `encode_state` wrote it."""
    file = state_file.decode_state(data, _File, VERSION)
    state = CpusetState(**{name: getattr(file, name) for name in CpusetState.__struct_fields__})
    try:
        for entry in state.pod_entries.values():
            for item in entry.values():
                parse_cpu_list(item.allocation_result)
    except ValueError as error:
        raise StateFileDamaged(f"it cannot be read: {error}") from None
    return file.boot_id, state


class CpusetCheckpoint:
    """The file in a locked state directory. `messages` reports what was wrong with it."""

    def __init__(self, state_dir: Path, boot_id: str, disk: FileWriter = INLINE_WRITER) -> None:
        self.path = state_dir / FILE_NAME
        self.messages: tuple[str, ...] = ()
        self._boot_id, self._disk = boot_id, disk
        self._submitted: CpusetState | None = None
        """The newest state that was passed to the disk thread, without fields whose change alone needs no write."""
        self._newest: CpusetState | None = None
        self._waits = False
        """Whether the newest state is not written yet."""
        self._failure: Unavailable | None = None

    def load(self, now_ns: int) -> CpusetState | None:
        """Return the saved state; None without a file that can be used, see `messages`. Raises Unavailable."""
        try:
            boot_id, state = decode_state(read_small_file(self.path, MAX_FILE_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(
                f"the CPU state cannot be read from {self.path}: {error.strerror}",
                "make the file readable for this user",
            ) from None
        except StateFileDamaged as error:
            self._quarantine(str(error))
            return None
        if boot_id != self._boot_id:
            return state_after_reboot(state, now_ns)
        self._submitted = _worth_saving(state)
        return state

    def save(self, state: CpusetState) -> bool:
        """Have the state written to disk; return whether it changed. Raises Unavailable if the latest write failed.

        Let the journal call `flush` before it writes the originals of the same cycle: their commit may have been queued before
        this state, and a new container is moved only after its CPUs are on disk.
        """
        worth = _worth_saving(state)
        if worth == self._submitted and self._failure is None:
            return False
        self._submitted, self._newest = worth, state
        self._waits = True
        self._disk.submit(FILE_NAME, self.flush)
        if self._failure is not None:
            raise self._failure
        return True

    def flush(self) -> None:
        """Write the newest state unless it is written. For the thread of the disk."""
        if self._waits:
            self._waits = False
            self._write()

    def _write(self) -> None:
        state = self._newest
        assert state is not None
        try:
            replace_file(self.path, encode_state(state, self._boot_id))
        except OSError as error:
            self._failure = write_failure("the CPU state cannot be written to", self.path, error)
        else:
            self._failure = None

    def _quarantine(self, reason: str) -> None:
        aside = quarantine_file(self.path, reason)
        self.messages = (
            f"{self.path} was damaged: {reason}. It was renamed to {aside}; the CPU state was rebuilt from the cgroups",
        )


def _worth_saving(state: CpusetState) -> CpusetState:
    # Headroom is an input of every cycle; saving its changes would write the file every second.
    return msgspec.structs.replace(state, numa_headroom={})
