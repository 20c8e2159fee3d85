"""The image, built once per content, and helm."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.cluster.binaries import CACHE, MINOR, Missing, compiled_program
from tests.cluster.cluster import Cluster, printed

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/dioptase"
IMAGE, TAG = "localhost/dioptase", "test"
SHARED_MACHINE = {"headroom": {"systemUse": False}}
"""Settings of the advisor on a machine that other tests keep busy, which would leave nothing to reclaimed pods."""
_CODE = ("api", "kube", "probes", "agent", "exporters", "controller", "cli", "demo")
_FILES = (
    "deploy/Dockerfile", "deploy/image", "deploy/sbom.py", "requirements.lock", "requirements-build.lock", "pyproject.toml",
)  # fmt: skip


def image_archive() -> Path:
    """Return the archive of this tree's image and delete the previous one. Raises Missing."""
    digest = hashlib.sha256()
    files = [ROOT / name for name in _FILES]
    files += sorted(path for name in _CODE for path in (ROOT / name).rglob("*") if _is_code(path))
    for path in files:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    folder = CACHE.parent / "image"
    created = folder / f"tested-{digest.hexdigest()[:12]}.tar"
    if not created.exists():
        for program in ("mmdebstrap", "buildah"):
            if shutil.which(program) is None:
                raise Missing(f"{program} is not installed: install it with deploy/install-packages image")
        folder.mkdir(parents=True, exist_ok=True)
        print("building the image: about two minutes, once", flush=True)
        try:
            subprocess.run([ROOT / "deploy/image", created, f"{IMAGE}:{TAG}"], check=True)
        except subprocess.CalledProcessError as error:
            raise Missing(f"the image cannot be built: {error}") from None
        for old in {*folder.glob("tested-*")} - {created, created.with_suffix(".cdx.json")}:
            old.unlink()
    return created


def _is_code(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and "recording" not in path.parts


def helm(cluster: Cluster, *words: object) -> str:
    """Return the output of helm, with the choice that the chart demands before Kubernetes 1.33. Raises Failed."""
    if CHART in words and MINOR < "1.33":
        words = (*words, "--set", "agent.kubelet.right=proxy")
    folder = cluster.names.run / "helm"
    settings = {"PATH": os.environ["PATH"], "HOME": str(folder), "KUBECONFIG": str(cluster.kubeconfig)}
    return printed([str(compiled_program("helm")), *map(str, words)], settings)
