"""Reviews of tokens by a real API server without nodes."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path

import pytest

from api.interfaces import Unavailable
from common.http.token_review import authorization_path
from kube.access_review import review_token
from kube.client import KubeClient
from kube.credentials import ApiAccess, ApiCredentials, CredentialData
from tests.cluster.cluster import Cluster
from tests.cluster.external_cluster import ExternalCluster
from tests.cluster.server import Server

pytestmark = pytest.mark.cluster


def account(server: Server, namespace: str, name: str, paths: list[str]) -> str:
    """Return a token of a new service account that may get these paths."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    server.ask("POST", accounts, {"metadata": {"name": name}})
    rbac, named = "rbac.authorization.k8s.io", {"name": f"{namespace}-{name}"}
    rules = [{"nonResourceURLs": paths, "verbs": ["get"]}] if paths else []
    server.ask("POST", f"/apis/{rbac}/v1/clusterroles", {"metadata": named, "rules": rules})
    binding = {
        "metadata": named,
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": named["name"]},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }
    server.ask("POST", f"/apis/{rbac}/v1/clusterrolebindings", binding)
    return str(server.ask("POST", f"{accounts}/{name}/token", {"spec": {}})["status"]["token"])


async def test_an_account_may_what_its_roles_say(client: KubeClient, server: Server, namespace: str) -> None:
    scraper = account(server, namespace, "scraper", ["/metrics"])
    viewer = account(server, namespace, "viewer", ["/metrics", "/dioptase/*"])
    no_match = account(server, namespace, "nobody", [])
    expected = {
        (scraper, "/metrics"): True,
        (scraper, authorization_path("/api/v1/view")): False,
        (viewer, authorization_path("/api/v1/view")): True,
        (viewer, authorization_path("/")): True,
        # Every authenticated user has this right, by the cluster's own role for discovery.
        (no_match, "/api/v1/view"): True,
        (no_match, authorization_path("/api/v1/view")): False,
        (no_match, "/metrics"): False,
        ("eyJhbGciOiJSUzI1NiJ9.e30.c2ln", "/metrics"): None,
        ("garbage", "/metrics"): None,
    }
    assert {request: await review_token(client, *request) for request in expected} == expected


@pytest.mark.long
async def test_a_token_of_an_account_that_is_gone_is_nobodys(
    client: KubeClient, server: Server, namespace: str
) -> None:
    token = account(server, namespace, "gone", ["/metrics"])
    assert await review_token(client, token, "/metrics") is True
    server.ask("DELETE", f"/api/v1/namespaces/{namespace}/serviceaccounts/gone")
    # The API server itself caches authenticated tokens for ten seconds.
    until = time.monotonic() + 30
    while await review_token(client, token, "/metrics") is not None:
        assert time.monotonic() < until
        await asyncio.sleep(0.5)


async def test_an_account_without_the_right_gets_the_missing_right(
    api_server: Cluster | ExternalCluster, server: Server, namespace: str, tmp_path: Path
) -> None:
    token = account(server, namespace, "poor", [])
    authority = tmp_path / "ca.crt"
    text = api_server.kubectl("config", "view", "--raw", "--flatten", "--minify", "--output=json")
    cluster = json.loads(text)["clusters"][0]["cluster"]
    authority.write_bytes(base64.b64decode(cluster["certificate-authority-data"]))
    parts = ApiCredentials(authority=CredentialData(path=authority), token=CredentialData(data=token.encode()))
    poor = ApiAccess(cluster["server"], parts)
    async with KubeClient(poor, "dioptase-tests") as other:
        with pytest.raises(Unavailable, match='cannot create resource "tokenreviews"') as raised:
            await review_token(other, token, "/metrics")
    assert "system:auth-delegator" in raised.value.remedy


async def test_an_unreachable_server_is_reported() -> None:
    async with KubeClient(ApiAccess("http://127.0.0.1:1", ApiCredentials()), "dioptase-tests") as client:
        with pytest.raises(Unavailable, match="the API server is not reachable"):
            await review_token(client, "token", "/metrics")
