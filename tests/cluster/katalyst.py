"""Katalyst's objects in JSON, and their paths in the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.cluster.server import MERGE, Refused, Server

CONFIG = "/apis/config.katalyst.kubewharf.io/v1alpha1"
CNCS, KCCS, ADMINS = f"{CONFIG}/customnodeconfigs", "katalystcustomconfigs", "adminqosconfigurations"
CNRS = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources"


def within(namespace: str, kind: str) -> str:
    """Return the path of a kind of configuration in a namespace."""
    return f"{CONFIG}/namespaces/{namespace}/{kind}"


def a_kcc(name: str = "all", kind: str = ADMINS, **spec: Any) -> dict[str, Any]:
    """Return a KatalystCustomConfig that declares AdminQoSConfigurations as configuration."""
    target = {"group": "config.katalyst.kubewharf.io", "version": "v1alpha1", "resource": kind}
    return _object("KatalystCustomConfig", name, {"targetType": target, **spec})


def an_admin(name: str, config: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
    """Return an AdminQoSConfiguration."""
    return _object("AdminQoSConfiguration", name, {"config": config, **spec})


def lending(report: str) -> dict[str, Any]:
    """Return a configuration that differs in one number."""
    return {"reclaimedResourceConfig": {"reservedResourceForReport": {"cpu": report}}}


def _object(kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    api = "config.katalyst.kubewharf.io/v1alpha1"
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": dict(spec)}


def configured_object(server: Server, node: str, kind: str = ADMINS) -> str | None:
    """Return the object of a kind that a node's CNC lists, with its hash; None without one."""
    status = server.ask("GET", f"{CNCS}/{node}").get("status", {})
    for item in status.get("katalystCustomConfigList", []):
        if item["configType"]["resource"] == kind:
            return f"{item['configName']} {item['hash']}"
    return None


def valid(server: Server, path: str) -> tuple[str, str, str]:
    """Return status, reason and message of an object's condition Valid. Raises StopIteration if it has none yet."""
    conditions = server.ask("GET", path).get("status", {}).get("conditions", [])
    item = next(item for item in conditions if item["type"] == "Valid")
    return item["status"], item["reason"], item["message"]


def change(server: Server, path: str, **spec: Any) -> None:
    """Patch fields of an object's specification."""
    server.ask("PATCH", path, {"spec": spec}, MERGE)


def is_deleted(server: Server, path: str) -> bool:
    """Return whether the object does not exist."""
    try:
        server.ask("GET", path)
    except Refused as error:
        if error.status != 404:
            raise
        return True
    return False
