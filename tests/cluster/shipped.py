"""What is installed with: the image, built once for what it is made of, and helm."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from tests.cluster.binaries import CACHE, beside
from tests.cluster.cluster import Cluster, printed

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/dioptase"
IMAGE, TAG = "localhost/dioptase", "test"
_CODE = ("api", "kube", "probes", "agent", "exporters", "controller", "cli", "demo")
_FILES = ("deploy/Dockerfile", "deploy/image", "requirements.lock", "pyproject.toml")


def archive() -> Path:
    """The image, as it would be built of this tree; the one before it goes. Raises CalledProcessError."""
    digest = hashlib.sha256()
    files = [ROOT / name for name in _FILES]
    files += sorted(path for name in _CODE for path in (ROOT / name).rglob("*") if _is_code(path))
    for path in files:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    folder = CACHE.parent / "image"
    made = folder / f"tested-{digest.hexdigest()[:12]}.tar"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([ROOT / "deploy/image", made, f"{IMAGE}:{TAG}"], check=True)
        for old in set(folder.glob("tested-*.tar")) - {made}:
            old.unlink()
    return made


def _is_code(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and "recording" not in path.parts


def helm(cluster: Cluster, *words: object) -> str:
    """What it prints. Raises Failed."""
    folder = cluster.names.run / "helm"
    settings = {"PATH": os.environ["PATH"], "HOME": str(folder), "KUBECONFIG": str(cluster.kubeconfig)}
    return printed([str(beside("helm")), *map(str, words)], settings)
