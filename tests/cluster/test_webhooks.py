"""The webhooks on a real API server, by the objects of the chart: pods, profiles, Nodes, configuration, certificates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.objects import a_pod
from tests.cluster.server import Refused, Server
from tests.cluster.webhooks import WebhookInstallation

pytestmark = [pytest.mark.cluster, pytest.mark.versions]
NATIVE = {"requests": {"cpu": "1500m", "memory": "64Mi"}, "limits": {"cpu": "2", "memory": "128Mi"}}


@pytest.fixture(scope="module")
def installation(
    own_cluster: Cluster, definitions: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WebhookInstallation]:
    created = WebhookInstallation(own_cluster, "test-webhooks", tmp_path_factory.mktemp("webhooks"))
    try:
        created.begin()
        wait("the certificate of the webhooks", created.published, 60)
        yield created
    finally:
        created.end()


@pytest.fixture
def room(installation: WebhookInstallation, namespace: str) -> str:
    """A namespace in which pods can be created, with webhooks that answer."""
    with contextlib.suppress(Refused):
        # Controllers create it, if there are any.
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        installation.cluster.server.ask("POST", path, {"metadata": {"name": "default"}})
    return namespace


def created_pod(server: Server, namespace: str, pod: dict[str, Any]) -> Any:
    """Return the pod as the API server would store it."""
    return server.ask("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)


def test_requests_of_a_reclaimed_pod_are_moved(server: Server, room: str) -> None:
    pod = created_pod(server, room, a_pod("batch", "reclaimed_cores", resources=NATIVE))
    resources = pod["spec"]["containers"][0]["resources"]
    assert (resources["requests"], resources["limits"]) == (
        {RECLAIMED_CPU: "1500", RECLAIMED_MEMORY: "67108864"},
        {RECLAIMED_CPU: "1500", RECLAIMED_MEMORY: "67108864"},
    )
    assert pod["status"]["qosClass"] == "BestEffort"
    online = created_pod(server, room, a_pod("web", "shared_cores", resources=NATIVE))
    assert online["spec"]["containers"][0]["resources"] == NATIVE
