"""Runs the commands of docs/install.md for an installation without helm, on a real node."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import chart
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.doc_commands import follow, steps
from tests.cluster.image_and_chart import IMAGE, ROOT, TAG
from tests.cluster.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.long]
_, PAGE = chart.INSTALL_DOCUMENT.read_text().split("## Without Helm")
CNR = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources/node1"


@pytest.fixture
def world(own_cluster: Cluster, tmp_path: Path, image: Path) -> Iterator[dict[str, str]]:
    """A node with the image under the name in the kustomize base, and a copy of the repository's files."""
    own_cluster.grow(1)
    own_cluster.nodes[0].load(image)
    own_cluster.nodes[0].tag(f"{IMAGE}:{TAG}", f"{IMAGE}:0.1.0")
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    path = f"{Path(sys.executable).parent}:{own_cluster.programs['kubectl'].parent}:/usr/bin:/bin"
    yield {"PATH": path, "KUBECONFIG": str(own_cluster.kubeconfig), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    own_cluster.kubectl("delete", "-k", chart.KUSTOMIZE_BASE.parent, "--ignore-not-found", "--timeout=60s")


def test_the_commands_of_the_page_install_and_uninstall(
    own_cluster: Cluster, server: Server, world: dict[str, str], tmp_path: Path
) -> None:
    install, uninstall = steps(PAGE)
    follow(install, world, tmp_path, 0)

    def reported() -> bool:
        managers = {item["manager"] for item in server.ask("GET", CNR)["metadata"]["managedFields"]}
        return {"dioptase-agent", "dioptase-lifecycle"} <= managers

    wait("both at work", reported, 60)
    follow(uninstall, world, tmp_path, 0)
    for path in ("/api/v1/namespaces/dioptase", "/apis/rbac.authorization.k8s.io/v1/clusterroles/dioptase-agent"):
        removed = server.refusal("GET", path)
        assert removed is not None
        assert removed.status == 404
