"""Runs the commands of docs/first-steps.md: the chart on a real node, a batch Job that uses idle CPU and yields."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import images
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import PATIENCE, wait
from tests.cluster.doc_commands import follow, steps
from tests.cluster.external_cluster import ExternalCluster
from tests.cluster.page_shell import page_shell
from tests.cluster.programs import CODE
from tests.cluster.test_quick_start import PAGE as QUICK_START

pytestmark = [pytest.mark.cluster, pytest.mark.long]
PAGE = (CODE / "docs/first-steps.md").read_text()


@pytest.fixture
def world(
    own_cluster: Cluster, cluster: Cluster | ExternalCluster, tmp_path: Path, image: Path
) -> Iterator[dict[str, str]]:
    """The page's prerequisites: a node with both images, and the shell's variables."""
    node = own_cluster.nodes[0]
    shell = tmp_path / "busybox.tar"
    images.write(shell, {_image_of(PAGE): ()})
    for archive in (image, shell):
        node.load(archive)
    yield page_shell(own_cluster, tmp_path, "first-steps") | {"IMAGE": _image_of(PAGE)}
    own_cluster.kubectl("delete", "job,pod", "batch", "service", "-n", "default", "--ignore-not-found", "--wait=false")


def _image_of(page: str) -> str:
    """Return the value that the page sets the shell variable IMAGE to."""
    (line,) = re.findall(r"^IMAGE=(\S+)$", page, re.M)
    return str(line)


def used_cores(world: dict[str, str]) -> dict[str, float]:
    """Return the CPU that each container of the node uses, by container name."""
    command = ["kubectl", "dioptase", "top", "pods", "-o", "json"]
    done = subprocess.run(
        command, env=world, cwd=CODE, capture_output=True, text=True, check=True, timeout=60 * PATIENCE
    )
    return {row["container"]: row.get("cpu_cores") or 0.0 for row in json.loads(done.stdout)}


def test_the_commands_of_the_page_have_the_outputs_of_the_page(world: dict[str, str]) -> None:
    listed = list(steps(PAGE))
    assert len(listed) == 10
    for step in listed:
        follow(step, world, CODE, 300)
        if "helm install" in step.script:
            # Helm owns the fields of the custom resources then: the first command of the quick start must still pass.
            follow(next(steps(QUICK_START)), world, CODE, 60)
        if "kind: Job" in step.script:
            # The node is shared with other tests: how much is idle varies, the limit of half a core does not.
            wait("the Job uses idle CPU", lambda: 0.1 < used_cores(world).get("batch", 0.0) < 0.6, 60)
        if "name: service" in step.script:
            wait("the Job yields", lambda: used_cores(world)["batch"] < used_cores(world)["service"] / 4, 60)
