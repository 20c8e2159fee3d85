"""Clusters for tests. A cluster grows with the requirements of the tests; only tests of exactly two nodes have another one.

A test that disturbs the cluster uses `own_cluster`, a test that relies on its nodes `cluster`; each test has its own namespace.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kube.client import KubeClient
from kube.kubeconfig import load_kubeconfig_access
from tests.cluster.binaries import Missing
from tests.cluster.cluster import Cluster, create_cluster
from tests.cluster.daemons import wait
from tests.cluster.external_cluster import ExternalCluster
from tests.cluster.image_and_chart import image_archive
from tests.cluster.server import Server


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster | ExternalCluster]:
    """An API server with etcd; other parts depend on the tests that ran before."""
    if listed := os.environ.get("KUBECONFIG"):
        try:
            yield ExternalCluster(Path(listed), tmp_path_factory.mktemp("kubeconfig"))
        except Missing as error:
            pytest.fail(str(error))
        return
    cluster = _create_cluster(0)
    yield cluster
    cluster.release()


@pytest.fixture(scope="session")
def own_cluster(api_server: Cluster | ExternalCluster) -> Cluster:
    """A cluster that tests may disturb."""
    if isinstance(api_server, ExternalCluster):
        pytest.skip("hurts the cluster, and that of KUBECONFIG may be in use: unset KUBECONFIG")
    return api_server


@pytest.fixture(scope="session")
def cluster(api_server: Cluster | ExternalCluster) -> Cluster | ExternalCluster:
    """A cluster with controllers, a scheduler and one ready node."""
    if isinstance(api_server, Cluster):
        api_server.grow(1)
    return api_server


@pytest.fixture(scope="session")
def image() -> Path:
    """The archive of this tree's image."""
    try:
        return image_archive()
    except Missing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Cluster]:
    """A cluster of exactly two nodes."""
    if os.environ.get("KUBECONFIG"):
        pytest.skip("looks at two nodes from within: unset KUBECONFIG")
    cluster = _create_cluster(2)
    yield cluster
    cluster.release()


@pytest.fixture(scope="session")
def server(api_server: Cluster | ExternalCluster) -> Server:
    """Plain requests to the API server, without the product's client."""
    return api_server.server


@pytest.fixture
def namespace(server: Server) -> Iterator[str]:
    """An empty namespace, deleted with its objects if there are controllers."""
    name = f"test-{uuid.uuid4().hex[:10]}"
    server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    server.ask("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
def workspace(cluster: Cluster | ExternalCluster, server: Server, namespace: str) -> str:
    """A namespace in which pods can be created."""
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    # Controllers whose API server was killed several times, by the tests before, look at it again after a minute only.
    wait("the service account", lambda: server.ask("GET", account), 150)
    return namespace


@pytest.fixture
async def client(api_server: Cluster | ExternalCluster) -> AsyncIterator[KubeClient]:
    """The product's client of the API server."""
    async with KubeClient(
        load_kubeconfig_access([api_server.kubeconfig], lambda _text: None), "dioptase-tests"
    ) as entered:
        yield entered


@pytest.fixture(scope="session")
def definitions(api_server: Cluster | ExternalCluster) -> Server:
    """The API server, once it serves every kind of deploy/crds."""
    folder = Path(__file__).resolve().parents[2] / "deploy/crds"
    api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", folder)
    api_server.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", folder)
    return api_server.server


def _create_cluster(nodes: int) -> Cluster:
    if os.geteuid() != 0:
        pytest.skip("namespaces and cgroups need root; or name a cluster with KUBECONFIG")
    try:
        return create_cluster(nodes)
    except Missing as error:
        pytest.skip(str(error))
