"""One machine of the Vagrantfile, in process, network and mount namespaces of its own: whatever it starts ends with them.

libvirtd, its bridge, dnsmasq, packet filter and QEMU are in there, and so is the forwarded port: `get` asks 127.0.0.1 of that
network, as a person would ask their own. `vagrant` and libvirt are the distribution's, the box is that of deploy/vagrant/box.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.builders.waiting import until

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PROGRAMS = {"vagrant": "vagrant", "libvirtd": "libvirt-daemon", "virsh": "libvirt-clients", "mmdebstrap": "mmdebstrap"}
"""Required programs and their packages."""
_FETCH = "import sys, urllib.request as r; sys.stdout.buffer.write(r.urlopen(sys.argv[1], timeout=30).read())"
DIRECTORY = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dioptase" / "vagrant"
"""Directory of a machine's files, several GiB; the next run removes it after a kill."""
URI = "qemu:///system"
PORT = 9102
LISTENS_WITHIN_S, ENDS_WITHIN_S, VAGRANT_WITHIN_S = 60.0, 60.0, 900


def missing() -> str | None:
    """Return what this machine lacks, or None."""
    if os.geteuid() != 0:
        return "needs root: namespaces and the files of the box"
    packages = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    return f"needs packages: deploy/install-packages vagrant ({', '.join(packages)})" if packages else None


def box() -> Path:
    """Return the directory of the box for these sources, built if needed."""
    built = subprocess.run([ROOT / "deploy/vagrant/box"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(built.stdout.strip())


def processes(namespace: Path | None) -> dict[int, str]:
    """Return the names of the processes in a process namespace, by their number outside."""
    result = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "ns/pid").readlink() == namespace:
                result[int(entry.name)] = (entry / "comm").read_text().strip()
        except OSError:
            continue  # it has ended
    return result


class Machine:
    """Namespaces with libvirtd, in which `vagrant` runs. `close` and the end of this process end everything in them.

    Without the directory of a locally built box the Vagrantfile names the public one, which can only be validated.
    """

    def __init__(self, box_directory: Path | None) -> None:
        DIRECTORY.parent.mkdir(parents=True, exist_ok=True)
        self._lock = DIRECTORY.with_suffix(".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # another run is waited for
        self.directory = DIRECTORY
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        self._log = self.directory / "libvirtd.log"
        self.namespace: Path | None = None
        """Name of the process namespace in /proc/PID/ns."""
        self._environment = {
            **os.environ,
            **({"DIOPTASE_BOX": str(box_directory)} if box_directory else {}),
            "VAGRANT_HOME": str(self.directory / "home"),
            "VAGRANT_DOTFILE_PATH": str(self.directory / "machine"),
            "VAGRANT_DEFAULT_PROVIDER": "libvirt",
            "VAGRANT_CHECKPOINT_DISABLE": "1",
            "VAGRANT_NO_COLOR": "1",
        }
        with self._log.open("wb") as text:
            # Were this process killed, unshare would be, and with it the first process of the namespaces, and so all in them.
            self._unshare = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--net", "--pid", "--mount-proc", "--fork",
                 "--kill-child", HERE / "namespaces-init", self.directory / "libvirt"],
                stdin=subprocess.DEVNULL, stdout=text, stderr=text,
            )  # fmt: skip
        try:
            self._wait_for_libvirtd()
        except BaseException:
            self.close()
            raise

    def _wait_for_libvirtd(self) -> None:
        deadline = time.monotonic() + LISTENS_WITHIN_S
        while self._run(["virsh", "--connect", URI, "version"]).returncode != 0:
            assert self._unshare.poll() is None, f"libvirtd ended: {self._log.read_text()}"
            assert time.monotonic() < deadline, f"libvirtd does not answer: {self._log.read_text()}"
            time.sleep(0.2)
        self.namespace = Path(f"/proc/{self._unshare.pid}/ns/pid_for_children").readlink()

    def _inside(self, argv: Sequence[str]) -> list[str]:
        own = f"/proc/{self._unshare.pid}/ns"
        return [
            "nsenter",
            f"--wdns={ROOT}",
            f"--mount={own}/mnt",
            f"--net={own}/net",
            f"--pid={own}/pid_for_children",
            "--",
            *argv,
        ]

    def _run(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._inside(argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )

    def vagrant(self, *arguments: str) -> str:
        """Run `vagrant`, show its output and return it. Raises AssertionError with the output if it fails."""
        print(f"\n$ vagrant {' '.join(arguments)}", flush=True)
        started, lines = time.monotonic(), []
        with subprocess.Popen(
            ["timeout", "--kill-after", "5", str(VAGRANT_WITHIN_S), *self._inside(["vagrant", *arguments])],
            env=self._environment, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as running:  # fmt: skip
            assert running.stdout is not None
            for line in running.stdout:  # universal newlines: a progress bar is many lines
                if "Progress:" not in line:
                    print(line, end="", flush=True)
                    lines.append(line)
        print(f"({time.monotonic() - started:.0f} s)", flush=True)
        text = "".join(lines)
        assert running.returncode == 0, f"vagrant {shlex.join(arguments)} ended with {running.returncode}:\n{text}"
        return text

    def ssh(self, command: str) -> str:
        """Return the output of a shell command run as root in the machine; the command must succeed."""
        return self.vagrant("ssh", "--command", f"sudo sh -c {shlex.quote(command)}")

    def get(self, path: str) -> bytes:
        """Return what the agent in the machine serves at the forwarded port."""
        request = subprocess.run(
            self._inside([sys.executable, "-c", _FETCH, f"http://127.0.0.1:{PORT}{path}"]),
            capture_output=True,
            check=False,
        )
        assert request.returncode == 0, request.stderr.decode(errors="replace")
        return request.stdout

    def virsh(self, *arguments: str) -> str:
        """Return the output of virsh in the namespaces."""
        done = self._run(["virsh", "--connect", URI, "--quiet", *arguments])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        """End the namespaces with everything in them, and remove their directory. Idempotent."""
        self._unshare.kill()
        self._unshare.wait()
        until(lambda: not processes(self.namespace), f"no process is left in {self.namespace}", ENDS_WITHIN_S)
        shutil.rmtree(self.directory, ignore_errors=not self.directory.exists())
        self._lock.close()
