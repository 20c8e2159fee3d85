"""Debian's stock kernels, prepared to boot without a boot loader: unpacked and uncompressed.

Nothing is installed on this machine: apt downloads packages from its sources, and they are unpacked into a cache, once per
version. A version in the cache is complete, even after a killed run or on a full disk.
"""

from __future__ import annotations

import fcntl
import lzma
import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dioptase" / "kernels"
METAPACKAGES = {"6.1": "linux-image-amd64", "6.12": "linux-image-6.12-amd64"}
"""Packages that depend on the newest kernel of each series; Debian 12 has the second in its security updates."""
_PAYLOAD, _SETUP_SECTORS, _SECTOR = 0x248, 0x1F1, 512
_ELF, _XZ, _ZSTD, _GZIP = b"\x7fELF", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x1f\x8b"


class Missing(Exception):
    """A requirement of a boot is missing; the text says which, with the remedy."""


class Kernel(NamedTuple):
    """One kernel, ready to boot."""

    version: str
    """Version as in `uname -r`."""
    directory: Path
    """Directory of the unpacked package; modules are in lib/modules."""

    @property
    def vmlinux(self) -> Path:
        """Return the ELF file that QEMU boots."""
        return self.directory / "vmlinux"


def obtain(series: str, cache: Path = CACHE) -> Kernel:
    """Return the newest kernel of the series `6.1` or `6.12`, from the cache or the distribution. Raises as `fill`."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        # A second process waits for the download and finds it in the cache. The lock is released when its holder dies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        version = _newest(series)
        if version is None or not (cache / version / "vmlinux").exists():
            # What yesterday's lists name may be gone from the archive; and a new machine has no lists.
            if os.geteuid() == 0:
                run_program(["apt-get", "update", "-q"])
            version = _newest(series)
        if version is None:
            raise Missing(
                f"apt knows no {METAPACKAGES[series]}: apt-get update, on Debian 12 with its security updates"
            )
        directory = cache / version
        if not (directory / "vmlinux").exists():
            fill(directory, version)
    return Kernel(version, directory)


def fill(directory: Path, version: str) -> None:
    """Download and unpack a version; the directory is complete or does not exist.

    Raises Missing, OSError and ValueError.
    """
    print(f"downloading and unpacking linux-image-{version}", flush=True)
    # A program started by a killed run may still be writing to the file.
    part = directory.with_name(f"{directory.name}.{os.getpid()}.part")
    for left in (directory, *directory.parent.glob(f"{directory.name}*.part")):
        shutil.rmtree(left, ignore_errors=True)
    try:
        part.mkdir()
        run_program(["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", f"linux-image-{version}"], part)
        (package,) = part.glob("*.deb")
        run_program(["dpkg", "-x", str(package), str(part)])
        package.unlink()
        run_program(["depmod", "-b", str(part), version])
        (part / "vmlinux").write_bytes(uncompressed((part / "boot" / f"vmlinuz-{version}").read_bytes()))
        part.rename(directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def run_program(command: Sequence[str], directory: Path | None = None) -> str:
    """Return a program's output in the C locale. Raises Missing with its error output, or if it is not installed."""
    try:
        done = subprocess.run(
            command, cwd=directory, env={**os.environ, "LC_ALL": "C"}, check=True, capture_output=True, text=True
        )
    except FileNotFoundError:
        raise Missing(f"{command[0]} is not installed: make packages-vm installs what a guest needs") from None
    except subprocess.CalledProcessError as error:
        raise Missing(f"{' '.join(command)}: {error.stderr.strip() or error.returncode}") from None
    return done.stdout


def newest_of(shown: str) -> str | None:
    """Return the version on which a metapackage depends, from the output of `apt-cache depends`; None without one."""
    result = re.search(r"Depends: linux-image-(\d\S+)", shown)
    return None if result is None else result[1]


def _newest(series: str) -> str | None:
    try:
        return newest_of(run_program(["apt-cache", "depends", METAPACKAGES[series]]))
    except Missing:
        return None


def uncompressed(image: bytes) -> bytes:
    """Return the ELF file in a bzImage (Documentation/arch/x86/boot.rst), which QEMU boots by PVH without decompressing it.

    Raises ValueError if it is missing or incomplete.
    """
    try:
        result = _payload(image)
    except (IndexError, struct.error, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ValueError(f"the kernel image is damaged: {error}") from error
    if not result.startswith(_ELF):
        raise ValueError("the payload of the kernel image is no ELF file")
    return result


def _payload(image: bytes) -> bytes:
    start = (image[_SETUP_SECTORS] + 1) * _SECTOR
    offset, length = struct.unpack_from("<II", image, _PAYLOAD)
    payload = image[start + offset : start + offset + length]
    if payload.startswith(_ZSTD):
        # The last four bytes are the size, which zstd does not expect.
        done = subprocess.run(["zstd", "-dcq"], input=payload[:-4], capture_output=True, check=False)
        if done.returncode:
            raise EOFError(done.stderr.decode(errors="replace").strip())
        return done.stdout
    if not payload.startswith((_XZ, _GZIP)):
        return b""
    decompressor = lzma.LZMADecompressor() if payload.startswith(_XZ) else zlib.decompressobj(31)
    unpacked = decompressor.decompress(payload)
    if not decompressor.eof:
        raise EOFError("it ends too early")
    return unpacked
