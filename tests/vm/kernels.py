"""Debian's stock kernels, made ready to boot without a boot loader: unpacked, uncompressed, with an initramfs of their modules.

Nothing is installed on this machine: the packages are downloaded and unpacked into a cache, once for each version.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dioptase" / "kernels"
METAPACKAGES = {"6.1": "linux-image-amd64", "6.12": "linux-image-6.12-amd64"}
"""The packages that stand for the newest kernel of each series: bookworm's own, and the one from its backports."""
MODULES = ("virtio_pci", "virtio_blk", "virtio_rng", "9pnet_virtio", "9p", "overlay")
TOOLS = ("sh", "mount", "umount", "insmod", "mkdir", "switch_root", "echo", "cat", "poweroff")
_PAYLOAD, _SETUP_SECTORS, _SECTOR = 0x248, 0x1F1, 512
_ELF = b"\x7fELF"


class Kernel(NamedTuple):
    """One kernel, ready to boot."""

    version: str
    """As `uname -r` has it."""
    directory: Path
    """Where its package is unpacked."""
    vmlinux: Path
    initramfs: Path


def obtain(series: str) -> Kernel:
    """The newest kernel of the series `6.1` or `6.12`, from the cache or from the distribution. Raises CalledProcessError."""
    version = _newest(METAPACKAGES[series])
    directory = CACHE / version
    if not (directory / "complete").exists():
        shutil.rmtree(directory, ignore_errors=True)
        _unpack(version, directory)
        (directory / "vmlinux").write_bytes(uncompressed((directory / "boot" / f"vmlinuz-{version}").read_bytes()))
        (directory / "initramfs").write_bytes(_initramfs(version, directory))
        (directory / "complete").touch()
    return Kernel(version, directory, directory / "vmlinux", directory / "initramfs")


def _newest(metapackage: str) -> str:
    shown = subprocess.run(["apt-cache", "depends", metapackage], check=True, capture_output=True, text=True).stdout
    found = re.search(r"Depends: linux-image-(\S+)", shown)
    if found is None:
        raise SystemExit(f"apt knows no {metapackage}: run apt-get update, on Debian 12 with its backports for 6.12")
    return found[1]


def _unpack(version: str, directory: Path) -> None:
    directory.mkdir(parents=True)
    print(f"downloading and unpacking linux-image-{version}", flush=True)
    subprocess.run(["apt-get", "download", "-q", f"linux-image-{version}"], check=True, cwd=directory)
    (package,) = directory.glob("*.deb")
    subprocess.run(["dpkg", "-x", str(package), str(directory)], check=True)
    package.unlink()
    subprocess.run(["depmod", "-b", str(directory), version], check=True)


def uncompressed(image: bytes) -> bytes:
    """The ELF file in a bzImage (Documentation/arch/x86/boot.rst): QEMU enters it by PVH and need not decompress it."""
    start = (image[_SETUP_SECTORS] + 1) * _SECTOR
    offset, length = struct.unpack_from("<II", image, _PAYLOAD)
    payload = image[start + offset : start + offset + length]
    if payload.startswith(b"\xfd7zXZ"):
        found = lzma.LZMADecompressor().decompress(payload)
    elif payload.startswith(b"\x28\xb5\x2f\xfd"):
        # The last four bytes are the size, which zstd does not expect.
        found = subprocess.run(["zstd", "-dcq"], input=payload[:-4], stdout=subprocess.PIPE, check=True).stdout
    else:
        found = zlib.decompressobj(31).decompress(payload)
    if not found.startswith(_ELF):
        raise ValueError("the payload of the kernel image is no ELF file")
    return found


def _initramfs(version: str, directory: Path) -> bytes:
    """A cpio archive with busybox, the modules that the root file system needs in order, and init."""
    archive = _Cpio()
    for name in ("bin", "proc", "sys", "dev", "ro", "rw", "new", "m"):
        archive.add(name, 0o040755, b"")
    archive.add("bin/busybox", 0o100755, Path("/bin/busybox").read_bytes())
    for tool in TOOLS:
        archive.add(f"bin/{tool}", 0o120777, b"busybox")
    names: list[str] = []
    for module in MODULES:
        shown = subprocess.run(
            ["modprobe", "-d", str(directory), "-S", version, "--show-depends", module],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for path in (Path(line.split()[1]) for line in shown.splitlines() if line.startswith("insmod ")):
            name = path.name.removesuffix(".xz")
            if name not in names:
                names.append(name)
                content = path.read_bytes()
                archive.add(f"m/{name}", 0o100644, lzma.decompress(content) if path.suffix == ".xz" else content)
    archive.add("m/order", 0o100644, "".join(f"{name}\n" for name in names).encode())
    archive.add("init", 0o100755, (HERE / "initramfs-init").read_bytes())
    return archive.finish()


class _Cpio:
    """A `newc` archive (Documentation/driver-api/early-userspace/buffer-format.rst), compressed."""

    def __init__(self) -> None:
        self._out, self._inode = io.BytesIO(), 0

    def add(self, name: str, mode: int, content: bytes) -> None:
        self._inode += 1
        fields = (self._inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        self._out.write(b"070701" + b"".join(b"%08x" % field for field in fields))
        for part in (name.encode() + b"\0", content):
            self._out.write(part)
            self._out.write(b"\0" * (-self._out.tell() % 4))

    def finish(self) -> bytes:
        self.add("TRAILER!!!", 0, b"")
        return gzip.compress(self._out.getvalue(), 1)
