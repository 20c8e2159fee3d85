"""A cluster to work with: `python -m tests.cluster`.


up [--nodes N] [--cgroup-driver D]
                  create it; prints the shell lines that point kubectl and helm at it
load [--image A]  import an archive of images on its nodes, build/dioptase.tar by default
down              remove it, and the remains of killed test runs
env               print the shell lines again.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.binaries import EXTRA_PROGRAMS, PROGRAMS, Missing, compiled_program, obtain
from tests.cluster.cleanup import ClusterNumberTaken, release_abandoned
from tests.cluster.cluster import Cluster, Failed, create_cluster
from tests.cluster.daemons import Late
from tests.cluster.dns import COREDNS, serve_names
from tests.cluster.image_and_chart import ROOT, image_archive
from tests.cluster.names import Names
from tests.cluster.node import CGROUPFS, SYSTEMD
from tests.cluster.server import Refused
from tests.cluster.stock_katalyst import obtain_katalyst

MAKE_TARGETS = {"up": "cluster", "load": "cluster-load", "down": "cluster-down", "env": "cluster"}
"""Verbs that need root, and the target of the Makefile to run for each."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = {
        "up": up, "load": load, "down": down, "env": env, "programs": programs, "build": build, "katalyst": katalyst,
    }  # fmt: skip
    parser.add_argument("verb", choices=tuple(verbs))
    parser.add_argument("--nodes", type=int, choices=range(1, 4), default=1)
    parser.add_argument(
        "--cgroup-driver", choices=(CGROUPFS, SYSTEMD), default=CGROUPFS,
        help="of the kubelets; systemd where it is the init of this machine, with one node",
    )  # fmt: skip
    parser.add_argument("--image", type=Path, default=ROOT / "build/dioptase.tar", metavar="A")
    options = parser.parse_args(arguments)
    try:
        if options.verb in MAKE_TARGETS and os.geteuid() != 0:
            raise Missing(f"network namespaces and cgroups need root: run sudo make {MAKE_TARGETS[options.verb]}")
        return verbs[options.verb](options)
    except (Missing, ClusterNumberTaken, Late, Failed, Refused, subprocess.CalledProcessError, OSError) as error:
        print(failure_text(error), file=sys.stderr)
        return 1


def failure_text(error: Exception) -> str:
    """Return what failed and what to do about it."""
    if isinstance(error, (Missing, ClusterNumberTaken)):
        return str(error)
    text = str(error)
    if isinstance(error, subprocess.CalledProcessError):
        words = " ".join(map(str, error.cmd))
        printed = (error.stderr or b"") if isinstance(error.stderr, (bytes, type(None))) else error.stderr.encode()
        text = f"{words} ended with exit code {error.returncode}: {printed.decode(errors='replace').strip()}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{text}\nFree some space there, then run make cluster again."
    remedy = "Run make cluster-down, which removes what is left, then make cluster again."
    if isinstance(error, Late):
        remedy = f"On a busy machine, wait until it is idle. {remedy}"
    return f"{text}\n{remedy}"


def _print_progress(text: str) -> None:
    print(text, flush=True)


def up(options: argparse.Namespace) -> int:
    nodes: int = options.nodes
    if options.cgroup_driver == SYSTEMD and (nodes > 1 or not Path("/run/systemd/system").is_dir()):
        # sd_booted(3). All kubelets of one systemd would share /kubepods.slice.
        raise Missing("--cgroup-driver systemd needs systemd as the init, and --nodes 1: leave one of the options out")
    obtain()
    for name in ("helm", COREDNS):
        compiled_program(name)
    began = time.monotonic()
    plural = "s" * (nodes > 1)
    _print_progress(f"creating a cluster with {nodes} node{plural}: usually 10 to 30 s")
    cluster = create_cluster(
        nodes, retained=True, cgroup_driver=options.cgroup_driver, progress=lambda text: _print_progress(f"  {text}")
    )
    _print_progress("  starting CoreDNS")
    serve_names(cluster)
    _print_progress(
        f"{nodes} node{plural} ready after {time.monotonic() - began:.1f} s; the shell lines for kubectl and helm:"
    )
    return env(options) if cluster.nodes else 1


def down(_options: argparse.Namespace) -> int:
    began = time.monotonic()
    removed = release_abandoned(also=(0,))
    what = f"cluster{'s' * (len(removed) > 1)} {', '.join(map(str, removed))} removed" if removed else "there was none"
    print(f"{what}, {time.monotonic() - began:.1f} s")
    return 0


def env(_options: argparse.Namespace) -> int:
    cluster = _existing_cluster()
    folders = f"{cluster.programs['kubectl'].parent}:{compiled_program('helm').parent}"
    print(f"export KUBECONFIG={cluster.kubeconfig}\nexport PATH={folders}:$PATH")
    return 0


def load(options: argparse.Namespace) -> int:
    image: Path = options.image
    if not image.is_file():
        raise Missing(f"there is no image {image}: build it with make image")
    for node in _existing_cluster().nodes:
        _print_progress(f"importing {image} on {node.name}: usually 5 to 20 s")
        node.load(image.absolute())
        print(f"{node.name} has {image}", flush=True)
    return 0


def _existing_cluster() -> Cluster:
    names = Names(0)
    if not names.run.exists():
        raise Missing("there is no cluster: create it with make cluster")
    return Cluster(names, obtain())


def programs(_options: argparse.Namespace) -> int:
    obtain()
    return 0


def build(_options: argparse.Namespace) -> int:
    # With an existing cluster, only requests are needed.
    obtain(("kubectl",) if os.environ.get("KUBECONFIG") else tuple(PROGRAMS))
    if not os.environ.get("KUBECONFIG"):
        for name in EXTRA_PROGRAMS:
            compiled_program(name)
        image_archive()
    return 0


def katalyst(options: argparse.Namespace) -> int:
    obtain_katalyst()
    return build(options)


def _end(number: int, _frame: object) -> None:
    # A signal ends a process without its `finally`: end what was started, and compilers too if this leads a process group.
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    sys.exit(128 + number)


if __name__ == "__main__":
    for _number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, _end)
    sys.exit(main(sys.argv[1:]))
