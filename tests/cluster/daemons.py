"""Programs that outlive this process: started in namespaces, recorded in files, and ended by identity, not by pid alone."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

SPACES = Path("/run/netns")
SYSTEM = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
PATIENCE = 10 if "DIOPTASE_VM" in os.environ else 1
"""Factor of all timeouts: in a guest every instruction may be translated."""
# The program's own shell writes its file, so that a process killed in between leaves no program without a file.
_SHELL = 'echo $$ > "$0" && exec "$@"'


class Late(Exception):
    """A condition did not hold in time; the text has the end of the program's log."""


class Command(msgspec.Struct, frozen=True):
    """The command of a daemon."""

    space: str
    """Network namespace, by which the daemon is recognized."""
    argv: tuple[str, ...]


class Daemons:
    """The daemons of one cluster; command, process id and log of each are files in one folder, for other processes too."""

    def __init__(self, folder: Path, programs: Mapping[str, Path]) -> None:
        self._folder, self._programs = folder, programs

    def start(self, name: str, space: str, argv: Sequence[object]) -> None:
        """Start a daemon in a network namespace and a session of its own; it outlives this process.

        `ip netns exec` is not used, because it mounts another /sys, without cgroups.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        command = Command(space, tuple(map(str, argv)))
        (self._folder / f"{name}.json").write_bytes(msgspec.json.encode(command))
        self.again(name)

    def again(self, name: str) -> None:
        """Start a daemon again with its recorded command."""
        command = msgspec.json.decode((self._folder / f"{name}.json").read_bytes(), type=Command)
        pid_file = self._folder / f"{name}.pid"
        pid_file.unlink(missing_ok=True)
        with self.log(name).open("ab") as log:
            subprocess.run(
                ["setsid", "--fork", "sh", "-c", _SHELL, str(pid_file),
                 "nsenter", f"--net={SPACES / command.space}", *command.argv],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True, cwd="/",
                # No more of ours: there may be proxies in it, which the cluster's addresses are not behind.
                env={"PATH": self.path},
            )  # fmt: skip
        wait(f"the process id of {name}", lambda: self._written(name) is not None, 10)
        wait(
            f"{name} in its namespace", lambda: self.pid(name) or not Path(f"/proc/{self._written(name)}").exists(), 10
        )

    @property
    def path(self) -> str:
        """Return the daemons' PATH: compiled programs come before the distribution's."""
        own = {str(path.parent): None for path in self._programs.values()}
        return os.pathsep.join(dict.fromkeys([*own, *SYSTEM]))

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob("*.json"))

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def pid(self, name: str) -> int | None:
        """Return the process id; None if the daemon does not run. A process of that number elsewhere is another program's."""
        pid = self._written(name)
        command = msgspec.json.decode((self._folder / f"{name}.json").read_bytes(), type=Command)
        return pid if pid in members(command.space) else None

    def end(self, name: str, number: signal.Signals = signal.SIGKILL, seconds: float = 20) -> None:
        """Send a signal and wait for the end; kill the daemon after the timeout. Its children live on."""
        pid = self.pid(name)
        if pid is None:
            return
        # Its first thread leaves the namespace before the last one has closed its sockets.
        began = started(pid)
        os.kill(pid, number)
        try:
            wait(f"the end of {name}", lambda: started(pid) != began, seconds)
        except Late:
            os.kill(pid, signal.SIGKILL)
            wait(f"the end of {name}", lambda: started(pid) != began, seconds)

    def wait(self, name: str, probe: Callable[[], object], seconds: float = 60) -> None:
        """Wait until the probe is true. Raises Late with the end of the log, at once if the daemon has ended."""

        def proceeding() -> object:
            # Checked first: a program that ends successfully in between is no failure.
            runs = self.pid(name) is not None
            try:
                if result := probe():
                    return result
            except Exception as error:
                if runs:
                    raise
                raise Late(f"{name} has ended: {error}") from None
            if not runs:
                raise Late(f"{name} has ended")
            return None

        try:
            wait(name, proceeding, seconds)
        except Late as error:
            raise Late(f"{error}: {self._tail(name)}") from None

    def _written(self, name: str) -> int | None:
        try:
            return int((self._folder / f"{name}.pid").read_text())
        except (OSError, ValueError):
            return None

    def _tail(self, name: str) -> str:
        try:
            return self.log(name).read_text(errors="replace")[-3000:]
        except OSError as error:
            return str(error)


def started(pid: int) -> str:
    """Return the start time of a process in the kernel's ticks; "" if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, threads, began = fields[0], fields[17], fields[19]
    return "" if state == "Z" and threads == "1" else began


def members(space: str) -> set[int]:
    """Return the processes in a network namespace; none if it does not exist."""
    try:
        expected = (SPACES / space).stat().st_ino
    except OSError:
        return set()
    return {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _space_of(path) == expected}


def _space_of(process: Path) -> int | None:
    try:
        return (process / "ns/net").stat().st_ino
    except OSError:
        # It has ended meanwhile.
        return None


def wait(what: str, probe: Callable[[], object], seconds: float = 60) -> None:
    """Wait until the probe is true. Raises Late with the probe's last error."""
    seconds *= PATIENCE
    until, last = time.monotonic() + seconds, ""
    while time.monotonic() < until:
        try:
            if probe():
                return
            last = ""
        except Late:
            raise
        except Exception as error:  # noqa: BLE001 - whatever is not there yet
            last = f": {error}"
        time.sleep(0.1)
    raise Late(f"{what}: not there after {seconds:g} s{last}")
