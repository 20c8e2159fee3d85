"""Reads the requests of service accounts from the API server's audit log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    # Others are the cluster's own.
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}


class AuditedRequest(NamedTuple):
    """One kind of request; `resource` includes the subresource, as in roles."""

    group: str
    resource: str
    verb: str


class Entry(NamedTuple):
    """One request and its result."""

    request: AuditedRequest
    status: int
    path: str


def words(folder: Path) -> list[str]:
    """Return the API server's audit options, with the log in this folder."""
    policy = folder / "audit.json"
    policy.write_text(json.dumps(POLICY))
    return [f"--audit-policy-file={policy}", f"--audit-log-path={folder / 'audit.log'}", "--audit-log-mode=blocking"]


def entries(folder: Path, account: str, agent: str = "") -> Iterator[Entry]:
    """Yield the requests of one account, `namespace/name`, in the order of their responses; watches when they begin.

    With `agent`, only those whose user agent begins so: two programs may share an account.
    """
    user = f"system:serviceaccount:{account.replace('/', ':')}"
    for line in (folder / "audit.log").read_text().splitlines():
        document = json.loads(line)
        about = document.get("objectRef")
        if (
            document["user"]["username"] == user
            and about is not None
            and document.get("userAgent", "").startswith(agent)
        ):
            resource = "/".join(part for part in (about["resource"], about.get("subresource")) if part)
            request = AuditedRequest(about.get("apiGroup", ""), resource, document["verb"])
            yield Entry(request, document["responseStatus"]["code"], document["requestURI"])
