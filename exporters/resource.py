"""Who sends to OpenTelemetry: this agent, on this host, in this container and pod, as far as it can be told.

Names are those of the semantic conventions. What the environment says by OpenTelemetry's own variables goes before what
is found, and the pod's identity comes by the downward API, under the names usual for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote
from uuid import UUID, uuid5

from api.ports import Unavailable
from api.text import printable

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
POD_VARIABLES = (
    ("k8s.node.name", ("K8S_NODE_NAME", "NODE_NAME")),
    ("k8s.namespace.name", ("K8S_NAMESPACE_NAME", "POD_NAMESPACE")),
    ("k8s.pod.name", ("K8S_POD_NAME", "POD_NAME")),
    ("k8s.pod.uid", ("K8S_POD_UID", "POD_UID")),
    ("k8s.container.name", ("K8S_CONTAINER_NAME", "CONTAINER_NAME")),
    ("k8s.cluster.name", ("K8S_CLUSTER_NAME",)),
)
INSTANCES = UUID("4d63009a-8d0f-11ee-aad7-4c796ed8e320")
"""The namespace that the conventions give for a `service.instance.id` made from an inherent identity."""
_CONTAINER_ID = re.compile(r"(?:^|[^0-9a-f])([0-9a-f]{64})(?:[^0-9a-f]|$)")
_LARGEST = 1 << 18


def detect(environ: Mapping[str, str], version: str, root: Path = Path("/")) -> dict[str, str]:
    """Attributes of the resource; `root` is where the machine's files are. Raises Unavailable that names a wrong variable."""
    found = {**dict(_host(root)), **dict(_container(root)), **dict(_pod(environ))}
    named = _named(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    service = {"service.name": "dioptase", "service.version": version}
    asked = {"service.name": environ["OTEL_SERVICE_NAME"]} if environ.get("OTEL_SERVICE_NAME") else {}
    told = {name: printable(value) for name, value in {**found, **service, **named, **asked}.items()}
    return {"service.instance.id": _instance(told), **told}


def _instance(told: Mapping[str, str]) -> str:
    """The same after a restart, and another on every node: Prometheus' label `instance` is made of it.

    A machine id alone may be that of an image, or of a template that many machines were made from.
    """
    machine = f"{told.get('host.id', '')}/{told['host.name']}"
    return told.get("k8s.pod.uid") or str(uuid5(INSTANCES, machine))


def _host(root: Path) -> Iterator[tuple[str, str]]:
    system = os.uname()
    yield "host.name", system.nodename
    yield "host.arch", ARCHITECTURES.get(system.machine, system.machine)
    yield "os.type", "linux"
    yield "os.description", f"{system.sysname} {system.release}"
    for path in ("etc/machine-id", "var/lib/dbus/machine-id"):
        if machine := _text(root / path).strip():
            yield "host.id", machine
            break
    release = dict(re.findall(r'^(NAME|VERSION_ID)="?([^"\n]*)"?$', _text(root / "etc/os-release"), re.MULTILINE))
    if "NAME" in release:
        yield "os.name", release["NAME"]
    if "VERSION_ID" in release:
        yield "os.version", release["VERSION_ID"]


def _container(root: Path) -> Iterator[tuple[str, str]]:
    """Our own cgroup names the container, unless it is in a namespace of its own: then a file mounted for it does."""
    for path, lines in (("proc/self/cgroup", ""), ("proc/self/mountinfo", "/hostname")):
        text = "\n".join(line for line in _text(root / path).splitlines() if lines in line)
        if match := _CONTAINER_ID.search(text):
            yield "container.id", match[1]
            return


def _pod(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for attribute, names in POD_VARIABLES:
        value = next((environ[name] for name in names if environ.get(name)), None)
        if value is not None:
            yield attribute, value


def _named(text: str) -> dict[str, str]:
    """`key=value,key=value`, values percent-encoded, as OpenTelemetry writes it."""
    named = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise Unavailable(
                f"OTEL_RESOURCE_ATTRIBUTES: {part!r} is not NAME=VALUE",
                "write it as in service.namespace=edge,deployment.environment.name=test; a comma in a value is %2C",
            )
        named[name.strip()] = unquote(value.strip())
    return named


def _text(path: Path) -> str:
    try:
        with path.open(errors="surrogateescape") as file:
            return file.read(_LARGEST)
    except OSError:
        return ""
