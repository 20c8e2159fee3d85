"""Images without a registry: Debian's static busybox as an archive that containerd imports."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

BUSYBOX = Path("/bin/busybox")
PAUSE, SHELL = "localhost/pause:1", "localhost/busybox:1"
IMAGES: Mapping[str, Sequence[str]] = {PAUSE: ("/bin/sleep", "2147483647"), SHELL: ("/bin/sh",)}
"""Images of every node, with their commands."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_FOLDERS = ("bin", "tmp", "etc", "proc", "sys", "dev")


def write(archive: Path, images: Mapping[str, Sequence[str]] = IMAGES, programs: Sequence[Path] = ()) -> None:
    """Write these images, which share one layer, in the format of `docker save`. `programs` are static ones that the layer has
    in its PATH besides busybox."""
    layer = _layer(programs)
    files = {"layer.tar": layer}
    manifest = []
    for name, entrypoint in images.items():
        config = json.dumps(
            {
                "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
                "os": "linux",
                "config": {"Env": ["PATH=/bin"], "Entrypoint": list(entrypoint)},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
            }
        ).encode()
        file = f"{hashlib.sha256(config).hexdigest()}.json"
        files[file] = config
        manifest.append({"Config": file, "RepoTags": [name], "Layers": ["layer.tar"]})
    with tarfile.open(archive, "w") as tar:
        for file, content in (*files.items(), ("manifest.json", json.dumps(manifest).encode())):
            entry = tarfile.TarInfo(file)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def _layer(programs: Sequence[Path]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for folder in _FOLDERS:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        for program in (BUSYBOX, *programs):
            tar.add(program, f"bin/{program.name}")
        applets = subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True).stdout.split()
        for applet in applets:
            if applet != "busybox":
                entry = tarfile.TarInfo(f"bin/{applet}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(entry)
    return content.getvalue()
