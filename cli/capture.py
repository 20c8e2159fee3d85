"""The `dioptase capture` command: archives the kernel files that the agent reads, for a problem report.
The archive holds no environment variables, command lines or process names.
"""

from __future__ import annotations

import io
import os
import stat
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO

import click
import msgspec

from agent.offline import capture as texts
from agent.offline.capture import CapturedFile
from agent.sensors.cgroup.hierarchy import Hierarchy, detect_hierarchy
from api import VERSION
from api.interfaces import Unavailable

PROC, SYS = Path("/proc"), Path("/sys")
MANIFEST = "manifest.json"
MAX_ARCHIVE_BYTES = 64 << 20
"""Limit for all files together; the manifest counts the files left out."""
_PROGRESS_EVERY_FILES = 500


class CaptureManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the manifest, the first file of an archive."""

    version: str
    """Version of dioptase."""
    kernel: str
    machine: str
    captured_at: str
    """UTC."""
    mode: str
    """Cgroup version: v1, v2 or hybrid."""
    ticks_per_second: int
    page_bytes: int
    files: int
    left_out: int


def _validate_output(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:  # noqa: ARG001 - as click asks
    """Callback of --output: reject an empty name before any work is done."""
    if value == "":
        raise click.BadParameter("name a file, or `-` for standard output")
    return None if value is None else Path(value)


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    callback=_validate_output,
    help="File of the archive, `-` for standard output; an existing file is replaced."
    "  [default: dioptase-capture-TIME.tar.gz]",
)
@click.option(
    "--cgroups", type=click.IntRange(min=1), default=1000, show_default=True, help="Maximum number of cgroups to read."
)
def capture(*, output: Path | None, cgroups: int) -> None:
    """Write an archive of the files of /proc, /sys and the cgroup trees that the agent reads, unchanged.

    It contains counters, and the names of cgroups, mounts, disks and network interfaces. It contains no environment variables,
    command lines or process names. Check it before you share it: `tar tzf FILE`.
    """
    if output is not None and not output.parent.is_dir():
        reason = f"there is no directory {output.parent}: create it with mkdir -p {output.parent}"
        raise click.BadParameter(reason, param_hint="--output")
    now = time.gmtime()
    path = output or Path(time.strftime("dioptase-capture-%Y%m%dT%H%M%SZ.tar.gz", now))
    try:
        hierarchy = detect_hierarchy(PROC)
        files, left_out = limit_size(
            _show_progress(chain(texts.capture_node(PROC, SYS), texts.capture_cgroups(hierarchy, cgroups)))
        )
        manifest = _manifest(hierarchy, now, len(files), left_out)
    except (Unavailable, OSError) as error:
        remedy = f": {error.remedy}" if isinstance(error, Unavailable) else ""
        click.echo(f"capture: {error}{remedy}", err=True)
        sys.exit(2)
    try:
        _write_output(path, manifest, files, int(time.time()))
    except (Unavailable, OSError) as error:
        text = f"{error.reason}: {error.remedy}" if isinstance(error, Unavailable) else error.strerror or error
        click.echo(f"capture: cannot write -o {path}: {text}", err=True)
        sys.exit(2)
    click.echo(f"wrote {len(files)} files" + (f", left out {left_out}" if left_out else "") + f": {path}", err=True)


def limit_size(files: Iterable[CapturedFile], max_bytes: int = MAX_ARCHIVE_BYTES) -> tuple[list[CapturedFile], int]:
    """Return the files that fit into `max_bytes`, and how many do not."""
    selected: list[CapturedFile] = []
    left_out = size = 0
    for file in files:
        length = len(file.text or b"")
        if size + length > max_bytes:
            left_out += 1
            continue
        size += length
        selected.append(file)
    return selected, left_out


def write_archive(stream: IO[bytes], manifest: CaptureManifest, files: Iterable[CapturedFile], mtime: int) -> None:
    """Write the archive: each file under its path on the machine, without the leading slash."""
    with tarfile.open(fileobj=stream, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        _add_member(archive, MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n", mtime)
        for path, text in files:
            _add_member(archive, str(path).lstrip("/"), text, mtime)


def _add_member(archive: tarfile.TarFile, name: str, text: bytes | None, mtime: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.mtime = mtime
    if text is None:
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(entry)
    else:
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))


def _write_output(path: Path, manifest: CaptureManifest, files: list[CapturedFile], mtime: int) -> None:
    """Write the archive to a file, pipe, device or standard output. Raises OSError; Unavailable if `path` is none of these."""
    if str(path) == "-" or _is_stdout(path):
        write_archive(sys.stdout.buffer, manifest, files, mtime)
        sys.stdout.buffer.flush()
        return
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    target = path.resolve()
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with target.open("wb") as file:
            write_archive(file, manifest, files, mtime)
        return
    if not stat.S_ISREG(mode):
        raise Unavailable("it is not a file, pipe or character device", "name a file, or use `-o -` and a pipe")
    # Renamed when complete, so that a partial archive never has its name.
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        try:
            write_archive(file, manifest, files, mtime)
            file.flush()
            Path(file.name).replace(target)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _is_stdout(path: Path) -> bool:
    """Whether the path is a link to standard output, such as /dev/stdout."""
    try:
        return path.samefile("/proc/self/fd/1") and path.is_symlink()
    except OSError:
        return False


def _manifest(hierarchy: Hierarchy, now: time.struct_time, files: int, left_out: int) -> CaptureManifest:
    machine = os.uname()
    return CaptureManifest(
        version=VERSION,
        kernel=f"{machine.sysname} {machine.release}",
        machine=machine.machine,
        captured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
        mode=hierarchy.mode,
        ticks_per_second=os.sysconf("SC_CLK_TCK"),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        files=files,
        left_out=left_out,
    )


def _show_progress(files: Iterable[CapturedFile]) -> Iterator[CapturedFile]:
    interactive = sys.stderr.isatty()
    for count, file in enumerate(files, 1):
        if interactive and count % _PROGRESS_EVERY_FILES == 0:
            click.echo(f"\r{count} files", nl=False, err=True)
        yield file
    if interactive:
        click.echo("\r", nl=False, err=True)
