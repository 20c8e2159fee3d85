"""One machine of QEMU: its processors, NUMA nodes, disks and the command that it runs.

KVM is used if this kernel boots with it; a /dev/kvm that can be opened is no proof. Otherwise every instruction is translated
(TCG), so that durations must not be measured there.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NamedTuple

from tests.vm.initramfs import initramfs
from tests.vm.kernels import Kernel, Missing

GUEST_INIT = Path(__file__).with_name("guest-init")
ROOT = Path(__file__).resolve().parent.parent.parent
LOST = 125
"""Exit status of a guest without a result: a panic, a hang, a lost result."""
DISKS = {"swap": 1 << 30, "data": 512 << 20}
"""Size of each disk in bytes, by serial number; only written blocks take space."""
CLOCKS = {"tcg": "tsc=reliable clocksource=tsc", "kvm": ""}
"""Kernel option that trusts the TSC: translated processors share one clock, but fail the kernel's test of it. The kernel would
read the HPET, a device access, for every clock_gettime. With the option Python starts twice as fast."""
QEMU = "qemu-system-x86_64"
BOUND = ("setpriv", "--pdeathsig", "KILL")
"""Prefix that ends the machine with this process, even after SIGKILL."""
_PROBE_S = 15.0
_KVM = Path("/dev/kvm")


class Shape(NamedTuple):
    """Processors, NUMA nodes, memory and init of a machine."""

    cpus: int = 4
    nodes: int = 2
    memory_mib: int = 3072
    systemd: bool = False
    """Whether systemd is the init, instead of a script."""

    def options(self) -> list[str]:
        """Return QEMU's options for processors and memory: each NUMA node is a socket, all have the same size.

        Raises Missing if the CPUs cannot be divided evenly.
        """
        if self.cpus % self.nodes:
            raise Missing(
                f"{self.cpus} CPUs cannot be shared out evenly to {self.nodes} NUMA nodes: give --cpus {2 * self.nodes}"
            )
        each, memory = self.cpus // self.nodes, self.memory_mib // self.nodes
        options = ["-smp", f"{self.cpus},sockets={self.nodes},cores={each},threads=1", "-m", f"{memory * self.nodes}M"]
        for node in range(self.nodes):
            options += [
                "-object", f"memory-backend-ram,id=m{node},size={memory}M",
                "-numa", f"node,nodeid={node},cpus={node * each}-{(node + 1) * each - 1},memdev=m{node}",
            ]  # fmt: skip
        pairs = [(item, other) for item in range(self.nodes) for other in range(self.nodes) if item != other]
        return options + [word for pair, other in pairs for word in ("-numa", f"dist,src={pair},dst={other},val=21")]


USUAL = Shape()


def run(
    kernel: Kernel, command: Sequence[str], out: Path, *, shape: Shape = USUAL, timeout_s: float = 600,
    data: Path | None = None,
) -> int:  # fmt: skip
    """Run a command as root in a guest with this machine's root, read-only; return its exit status, or LOST.

    The guest can write only to `out`, which it sees as /run/out; the console goes to `console.log` there and to the terminal.
    `data` is the file of the data disk, for the next boot too; without one the disk is empty and temporary. Raises Missing
    and OSError.
    """
    if wrong := re.search(r"[\s,]", f"{ROOT}{kernel.directory}{out.resolve()}"):
        raise Missing(
            f"a path has {wrong[0]!r} in it, which QEMU and the kernel's command line split at: {ROOT}, {out}"
        )
    if shutil.which(QEMU) is None:
        raise Missing(f"{QEMU} is not installed: make packages-vm installs what a guest needs")
    shape.options()  # before anything is touched or said
    out.mkdir(parents=True, exist_ok=True)
    console, started = out / "console.log", time.monotonic()
    # A guest that has run may have left links in their places.
    for file in (console, out / "status", out / "command"):
        file.unlink(missing_ok=True)
    (out / "command").write_text(shlex.join(command) + "\n")
    with ExitStack() as stack:
        first = stack.enter_context(_nameless())
        first.write(initramfs(kernel))
        first.flush()
        accelerator = _accelerator(kernel, first, out)
        print(f"booting {kernel.version}: {shape.cpus} CPUs, {shape.nodes} NUMA nodes, {accelerator}", flush=True)
        plain = "" if sys.stdout.isatty() else "NO_COLOR=1 "  # the kernel hands on what it does not know
        init = "guest.systemd " if shape.systemd else ""
        disks = {name: stack.enter_context(_nameless()) for name in DISKS}
        if data is not None:
            disks["data"] = stack.enter_context(data.open("r+b" if data.exists() else "w+b"))
        argv = [
            *_argv(kernel, first, accelerator, shape), *_disks(disks), *_shares(out),
            "-append", _append(kernel, f"panic=-1 oops=panic quiet {init}{plain}{CLOCKS[accelerator]}"), "-serial", "stdio",
        ]  # fmt: skip
        files = [file.fileno() for file in (first, *disks.values())]
        ended = watch(argv, console, timeout_s, files)
        if accelerator == "tcg" and is_translators_fault(console.read_bytes()):
            print(f"\nthat was {QEMU}'s own fault, not the kernel's: once more", flush=True)
            (out / "status").unlink(missing_ok=True)
            ended = watch(argv, console, timeout_s, files)
    status = status_of(out) if ended == 0 and b"Kernel panic" not in console.read_bytes() else LOST
    if ended is None:
        print(
            f"\nthe guest was still at it after {timeout_s:.0f} s and was ended; its last words are above", flush=True
        )
    elif ended:
        print(f"\n{QEMU} ended with {ended}; its last words are above", flush=True)
    elif status == LOST:
        print("\nthe guest ended without a result; its last words are above", flush=True)
    print(f"the guest ended with {status} after {time.monotonic() - started:.0f} s; {console}", flush=True)
    return status


def is_translators_fault(console: bytes) -> bool:
    """Return whether the kernel hit a breakpoint that it had removed, a fault of QEMU's translator.

    The kernel patches its code (tracepoints) behind an int3 and synchronizes all CPUs before it removes the int3. With several
    translated CPUs one may still run the old translation: observed once in a dozen boots that open every probe.
    """
    return re.search(rb"int3: 0000 \[#1\]", console) is not None


def status_of(out: Path) -> int:
    """Return the guest's exit status, or LOST."""
    left = out / "status"
    try:
        status = int(left.read_text()) if left.is_file() else LOST
    except (OSError, ValueError):
        return LOST
    return status if 0 <= status <= 255 else LOST


def watch(argv: Sequence[str], console: Path, timeout_s: float, files: Sequence[int] = ()) -> int | None:
    """Show and record a program's output until it ends; it is killed at the timeout and when this process ends.

    Return its exit status, or None if it was killed. It inherits these open files. Raises OSError.
    """
    deadline = time.monotonic() + timeout_s
    with (
        console.open("wb") as log,
        subprocess.Popen([*BOUND, *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=files) as process,
    ):
        assert process.stdout is not None
        text = select.poll()
        text.register(process.stdout, select.POLLIN)
        try:
            while (left := deadline - time.monotonic()) > 0 and text.poll(left * 1000):
                # As it comes: a line that is not whole yet may be the last one for a long time.
                result = os.read(process.stdout.fileno(), 1 << 16)
                if not result:
                    return process.wait(left)
                log.write(result)
                log.flush()
                sys.stdout.buffer.write(result.replace(b"\r\n", b"\n"))
                sys.stdout.flush()
            return None
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()


def _nameless() -> IO[bytes]:
    # Gone with the last process that has it open, however that ends.
    return tempfile.TemporaryFile()


def _accelerator(kernel: Kernel, first: IO[bytes], out: Path) -> str:
    if not os.access(_KVM, os.W_OK):
        return "tcg"
    console = out / "kvm.log"
    argv = [*_argv(kernel, first, "kvm", Shape(cpus=1, nodes=1)), "-append", _append(kernel, "guest.probe panic=-1")]
    try:
        subprocess.run(
            [*BOUND, *argv, "-serial", f"file:{console}"],
            timeout=_PROBE_S, check=True, capture_output=True, stdin=subprocess.DEVNULL, pass_fds=[first.fileno()],
        )  # fmt: skip
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return "tcg"
    return "kvm" if "GUEST is up" in console.read_text(errors="replace") else "tcg"


def _argv(kernel: Kernel, first: IO[bytes], accelerator: str, shape: Shape) -> list[str]:
    # A string instruction is translated to a loop over bytes: the guest must not treat it as the fast way to copy.
    how = ["kvm", "host"] if accelerator == "kvm" else ["tcg,thread=multi", "max,-erms,-fsrm"]
    return [
        QEMU, "-M", "q35", "-accel", how[0], "-cpu", how[1], *shape.options(),
        "-kernel", str(kernel.vmlinux), "-initrd", f"/proc/self/fd/{first.fileno()}",
        "-device", "virtio-rng-pci", "-display", "none", "-nodefaults", "-no-reboot",
    ]  # fmt: skip


def _append(kernel: Kernel, more: str) -> str:
    return f"console=ttyS0 nokaslr guest.init={GUEST_INIT} guest.kernel={kernel.directory} guest.cwd={ROOT} {more}"


def _disks(disks: dict[str, IO[bytes]]) -> list[str]:
    options = []
    for name, file in disks.items():
        file.truncate(DISKS[name])
        options += [
            "-drive", f"file=/proc/self/fd/{file.fileno()},if=none,id={name},format=raw,cache=unsafe",
            "-device", f"virtio-blk-pci,drive={name},serial={name}",
        ]  # fmt: skip
    return options


def _shares(out: Path) -> list[str]:
    return [
        "-fsdev", "local,id=fs0,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=fs0,mount_tag=root",
        "-fsdev", f"local,id=fs1,path={out.resolve()},security_model=none",
        "-device", "virtio-9p-pci,fsdev=fs1,mount_tag=out",
    ]  # fmt: skip
