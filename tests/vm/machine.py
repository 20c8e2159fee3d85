"""One machine of QEMU: its processors, NUMA nodes, disks and the command that it runs. It ends by itself, or is ended.

KVM is used where this very kernel is seen to boot with it; a /dev/kvm that can be opened is no proof. Else every instruction
is translated (TCG): nothing that takes time is to be measured there.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.vm.kernels import HERE, Kernel

ROOT = HERE.parent.parent
LOST = 125
"""Exit status where the guest did not come back with one: a panic, a hang, a result that was lost."""
_PROBE_S = 15.0
_KVM = Path("/dev/kvm")


class Shape(NamedTuple):
    """What the machine looks like."""

    cpus: int = 4
    nodes: int = 2
    memory_mib: int = 3072

    def options(self) -> list[str]:
        """Processors and memory for the command line of QEMU, NUMA nodes of the same size."""
        each, memory = self.cpus // self.nodes, self.memory_mib // self.nodes
        options = ["-smp", f"{self.cpus},sockets={self.nodes},cores={each},threads=1", "-m", f"{memory * self.nodes}M"]
        for node in range(self.nodes):
            options += [
                "-object", f"memory-backend-ram,id=m{node},size={memory}M",
                "-numa", f"node,nodeid={node},cpus={node * each}-{(node + 1) * each - 1},memdev=m{node}",
            ]  # fmt: skip
        for node in range(self.nodes):
            options += [
                word
                for other in range(self.nodes)
                if other != node
                for word in ("-numa", f"dist,src={node},dst={other},val=21")
            ]
        return options


def run(kernel: Kernel, command: Sequence[str], out: Path, *, shape: Shape = Shape(), timeout_s: float = 600) -> int:
    """Run a command as root in a guest whose root is this machine's, read-only; its exit status, or LOST.

    The guest may write to `out` alone, which it sees as /run/out; the console goes to `console.log` there and to the terminal.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "status").unlink(missing_ok=True)
    (out / "command").write_text(shlex.join(command) + "\n")
    accelerator = _accelerator(kernel, out)
    print(f"booting {kernel.version}: {shape.cpus} CPUs, {shape.nodes} NUMA nodes, {accelerator}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as disks:
        argv = _argv(kernel, accelerator, shape) + _disks(Path(disks)) + _shares(out)
        argv += ["-append", _append(kernel, "panic=-1 oops=panic quiet"), "-serial", "stdio"]
        _watch(argv, out / "console.log", timeout_s)
    try:
        status = int((out / "status").read_text())
    except (FileNotFoundError, ValueError):
        status = LOST
        print(f"the guest was lost; {out / 'console.log'} has its last words", flush=True)
    print(f"the guest ended with {status} after {time.monotonic() - started:.0f} s", flush=True)
    return status


def _watch(argv: Sequence[str], console: Path, timeout_s: float) -> None:
    """Show and keep what the console says until the machine ends, or end it."""
    with (
        console.open("wb") as log,
        subprocess.Popen(["timeout", "-k", "5", str(timeout_s), *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as qemu,
    ):  # fmt: skip
        assert qemu.stdout is not None
        for line in qemu.stdout:
            log.write(line)
            sys.stdout.buffer.write(line.replace(b"\r", b""))
            sys.stdout.flush()


def _accelerator(kernel: Kernel, out: Path) -> str:
    if not os.access(_KVM, os.W_OK):
        return "tcg"
    console = out / "kvm.log"
    argv = [*_argv(kernel, "kvm", Shape(cpus=1, nodes=1)), "-append", _append(kernel, "guest.probe panic=-1")]
    try:
        subprocess.run(
            [*argv, "-serial", f"file:{console}"], timeout=_PROBE_S, check=True, capture_output=True, stdin=subprocess.DEVNULL
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return "tcg"
    return "kvm" if "GUEST is up" in console.read_text(errors="replace") else "tcg"


def _argv(kernel: Kernel, accelerator: str, shape: Shape) -> list[str]:
    how = ["kvm", "host"] if accelerator == "kvm" else ["tcg,thread=multi", "max"]
    return [
        "qemu-system-x86_64", "-M", "q35", "-accel", how[0], "-cpu", how[1], *shape.options(),
        "-kernel", str(kernel.vmlinux), "-initrd", str(kernel.initramfs),
        "-device", "virtio-rng-pci", "-display", "none", "-nodefaults", "-no-reboot",
    ]  # fmt: skip


def _append(kernel: Kernel, more: str) -> str:
    return (
        f"console=ttyS0 nokaslr guest.init={HERE / 'guest-init'} guest.kernel={kernel.directory} guest.cwd={ROOT} {more}"
    )


def _disks(directory: Path) -> list[str]:
    """A disk for swap and one for data, known by their serial numbers."""
    options = []
    for name, size in (("swap", 1 << 30), ("data", 512 << 20)):
        path = directory / name
        with path.open("wb") as file:
            file.truncate(size)
        options += [
            "-drive", f"file={path},if=none,id={name},format=raw,cache=unsafe",
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
