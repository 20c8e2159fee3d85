"""The first file system of a guest: busybox, the modules that its root file system needs, and init.

It is packed again for every boot, in half a second, so that it is never stale.
"""

from __future__ import annotations

import gzip
import io
import lzma
from pathlib import Path

from tests.vm.kernels import Kernel, Missing, run_program

INIT = Path(__file__).with_name("initramfs-init")
BUSYBOX = Path("/bin/busybox")
MODULES = ("virtio_pci", "virtio_blk", "virtio_rng", "9pnet_virtio", "9p", "overlay")
TOOLS = ("sh", "mount", "umount", "insmod", "mkdir", "switch_root", "echo", "cat", "poweroff")
DIRECTORIES = ("bin", "proc", "sys", "dev", "ro", "rw", "new", "m")


def initramfs(kernel: Kernel) -> bytes:
    """Return the compressed archive for this kernel. Raises Missing."""
    if not BUSYBOX.exists():
        raise Missing(f"{BUSYBOX} is not installed: make packages-vm installs what a guest needs")
    archive = Cpio()
    for name in DIRECTORIES:
        archive.add(name, 0o040755, b"")
    archive.add("bin/busybox", 0o100755, BUSYBOX.read_bytes())
    for tool in TOOLS:
        archive.add(f"bin/{tool}", 0o120777, b"busybox")
    modules = _modules(kernel)
    for name, content in modules.items():
        archive.add(f"m/{name}", 0o100644, content)
    archive.add("m/order", 0o100644, "".join(f"{name}\n" for name in modules).encode())
    archive.add("init", 0o100755, INIT.read_bytes())
    return gzip.compress(archive.finish(), 1)


def _modules(kernel: Kernel) -> dict[str, bytes]:
    # By name, in the order in which they have to be loaded.
    result: dict[str, bytes] = {}
    for module in MODULES:
        shown = run_program(["modprobe", "-d", str(kernel.directory), "-S", kernel.version, "--show-depends", module])
        for path in (
            Path(line.removeprefix("insmod ").strip()) for line in shown.splitlines() if line.startswith("insmod ")
        ):
            name = path.name.removesuffix(".xz")
            if name not in result:
                result[name] = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return result


class Cpio:
    """A `newc` archive (Documentation/driver-api/early-userspace/buffer-format.rst)."""

    def __init__(self) -> None:
        self._out, self._inode = io.BytesIO(), 0

    def add(self, name: str, mode: int, content: bytes) -> None:
        """Add an entry; `mode` has its type as st_mode does, and a symbolic link's content is its target."""
        self._inode += 1
        fields = (self._inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        self._out.write(b"070701" + b"".join(b"%08x" % field for field in fields))
        for part in (name.encode() + b"\0", content):
            self._out.write(part)
            self._out.write(b"\0" * (-self._out.tell() % 4))

    def finish(self) -> bytes:
        """Return the whole archive."""
        self.add("TRAILER!!!", 0, b"")
        return self._out.getvalue()
