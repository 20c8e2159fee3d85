"""The command behind `make cluster`: each failure names what to do about it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.__main__ import failure_text
from tests.cluster.binaries import Missing, obtain
from tests.cluster.cleanup import _taken_text
from tests.cluster.cluster import Failed
from tests.cluster.daemons import Late
from tests.cluster.programs import CODE


@pytest.mark.parametrize(
    ("error", "texts"),
    [
        (Missing("there is no cluster: create it with make cluster"), ["create it with make cluster"]),
        (Late("node1-kubelet: 90 s"), ["node1-kubelet: 90 s", "wait until it is idle", "make cluster-down"]),
        (Failed("kubectl apply: refused"), ["kubectl apply: refused", "make cluster-down", "then make cluster"]),
        (
            subprocess.CalledProcessError(2, ["ip", "netns", "add", "x"], stderr=b"File exists\n"),
            ["ip netns add x ended with exit code 2: File exists", "make cluster-down"],
        ),
        (subprocess.CalledProcessError(1, ["ip", "link"], stderr="no device"), ["exit code 1: no device"]),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x"), ["No space left", "/tmp/x", "Free some space"]),
        (OSError(errno.EBUSY, os.strerror(errno.EBUSY)), ["busy", "make cluster-down"]),
    ],
)
def test_a_failure_names_its_remedy(error: Exception, texts: list[str]) -> None:
    text = failure_text(error)
    assert [part for part in texts if part not in text] == []


def test_a_program_that_is_missing_names_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="install it with deploy/install-packages cluster"):
        obtain(("kube-apiserver",), tmp_path, {"PATH": str(tmp_path), "KUBEBUILDER_ASSETS": ""})


def test_a_second_cluster_names_the_first_and_how_to_remove_it() -> None:
    text = _taken_text(retained=True, home=Path("/clusters"))
    assert "in /clusters/0: print its shell lines with .venv/bin/python -m tests.cluster env" in text
    assert "remove it with make cluster-down" in text
    assert "all 7 numbers" in _taken_text(retained=False, home=Path("/clusters"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("verb", "target"), [("up", "cluster"), ("load", "cluster-load"), ("down", "cluster-down")])
def test_without_root_the_command_names_the_target_to_run_as_root(verb: str, target: str) -> None:
    script = f"import os, sys; from tests.cluster.__main__ import main; os.seteuid(65534); sys.exit(main(['{verb}']))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=CODE, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == f"network namespaces and cgroups need root: run sudo make {target}"
