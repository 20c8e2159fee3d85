"""Reads the OpenTelemetry settings and the resource attributes from the environment and from the host's files.
The variables are OpenTelemetry's own, each also in its form for one signal. Raises Unavailable that names a wrong
variable. Headers and TLS files are read by the SDK's exporters. The pod's identity comes by the downward API. Must
not import opentelemetry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote
from uuid import UUID, uuid5

import msgspec

from api import VERSION
from api.interfaces import Unavailable
from api.text import encodable, quote

PROTOCOL_GRPC, PROTOCOL_HTTP = "grpc", "http/protobuf"


class OtlpSignal(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one signal."""

    endpoint: str
    """Address; with the path for HTTP."""
    protocol: str
    compression: str
    every_s: float
    timeout_s: float
    """Timeout of one export, retries included."""
    certificate: bool = False
    """Whether a file with trusted authorities is configured."""


class OtlpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of both signals; a signal that is None is not sent."""

    metrics: OtlpSignal | None
    traces: OtlpSignal | None
    resource: Mapping[str, str] = {}


ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
POD_VARIABLES = (
    ("k8s.node.name", ("K8S_NODE_NAME", "NODE_NAME")),
    ("k8s.namespace.name", ("K8S_NAMESPACE_NAME", "POD_NAMESPACE")),
    ("k8s.pod.name", ("K8S_POD_NAME", "POD_NAME")),
    ("k8s.pod.uid", ("K8S_POD_UID", "POD_UID")),
    ("k8s.container.name", ("K8S_CONTAINER_NAME", "CONTAINER_NAME")),
    ("k8s.cluster.name", ("K8S_CLUSTER_NAME",)),
)
INSTANCE_NAMESPACE = UUID("4d63009a-8d0f-11ee-aad7-4c796ed8e320")
"""Namespace UUID of the conventions for a `service.instance.id` derived from an existing identity."""
CONTAINER_ID = re.compile(r"(?:^|[^0-9a-f])([0-9a-f]{64})(?:[^0-9a-f]|$)")
_MAX_FILE_CHARS = 1 << 18


def detect_resource(environ: Mapping[str, str], version: str, root: Path = Path("/")) -> dict[str, str]:
    """Return the resource attributes; `root` has the machine's files. Raises Unavailable that names a wrong variable."""
    detected = {**dict(_host(root)), **dict(_container(root)), **dict(_pod(environ))}
    named = _parse_attributes(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    service = {"service.name": "dioptase", "service.version": version}
    service_name = {"service.name": environ["OTEL_SERVICE_NAME"]} if environ.get("OTEL_SERVICE_NAME") else {}
    attributes = {name: encodable(value) for name, value in {**detected, **service, **named, **service_name}.items()}
    return {"service.instance.id": _instance(attributes), **attributes}


def _instance(attributes: Mapping[str, str]) -> str:
    """Return an id that survives restarts and differs between nodes: it becomes Prometheus' label `instance`.

    The machine id alone is not unique: it may come from an image that many machines share.
    """
    machine = f"{attributes.get('host.id', '')}/{attributes['host.name']}"
    return attributes.get("k8s.pod.uid") or str(uuid5(INSTANCE_NAMESPACE, machine))


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
    """Yield the container id from our cgroup path, or from a mounted file if the cgroup namespace hides it."""
    for path, lines in (("proc/self/cgroup", ""), ("proc/self/mountinfo", "/hostname")):
        text = "\n".join(line for line in _text(root / path).splitlines() if lines in line)
        if match := CONTAINER_ID.search(text):
            yield "container.id", match[1]
            return


def _pod(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for attribute, names in POD_VARIABLES:
        value = next((environ[name] for name in names if environ.get(name)), None)
        if value is not None:
            yield attribute, value


def _parse_attributes(text: str) -> dict[str, str]:
    """Parse `key=value,key=value` with percent-encoded values, the format of OpenTelemetry."""
    named = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise Unavailable(
                f"OTEL_RESOURCE_ATTRIBUTES: {quote(part)} is not NAME=VALUE",
                "write it as in service.namespace=edge,deployment.environment.name=test; a comma in a value is %2C",
            )
        named[name.strip()] = unquote(value.strip())
    return named


def _text(path: Path) -> str:
    try:
        with path.open(errors="surrogateescape") as file:
            return file.read(_MAX_FILE_CHARS)
    except OSError:
        return ""


OTLP_PREFIX = "OTEL_EXPORTER_OTLP_"
TIMEOUT_MS, METRICS_INTERVAL_MS, SPANS_INTERVAL_MS = 5_000, 60_000, 5_000
MIN_INTERVAL_MS, MAX_INTERVAL_MS = 100, 86_400_000
COMPRESSIONS = ("none", "gzip")
EXPORTERS = ("otlp", "none")
SUPPORTED_PREFERENCES = (
    (f"{OTLP_PREFIX}METRICS_TEMPORALITY_PREFERENCE", "cumulative"),
    (f"{OTLP_PREFIX}METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "explicit_bucket_histogram"),
)
"""Preferences with one supported value: counters of the kernel and the probes are sent as they are."""
TLS_FILES = ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")


def read_otlp_settings(environ: Mapping[str, str]) -> OtlpSettings | None:
    """Return None without an endpoint or if OTEL_SDK_DISABLED is true. Raises Unavailable that names a wrong variable."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    metrics = _signal(environ, "METRICS", ("OTEL_METRIC_EXPORT_INTERVAL", METRICS_INTERVAL_MS))
    for variable, only in SUPPORTED_PREFERENCES if metrics is not None else ():
        _one_of(environ, (variable,), (only,))
    traces = _signal(environ, "TRACES", ("OTEL_BSP_SCHEDULE_DELAY", SPANS_INTERVAL_MS))
    if metrics is None and traces is None:
        return None
    return OtlpSettings(metrics=metrics, traces=traces, resource=detect_resource(environ, VERSION))


def _signal(environ: Mapping[str, str], name: str, every: tuple[str, int]) -> OtlpSignal | None:
    own, common = environ.get(f"{OTLP_PREFIX}{name}_ENDPOINT"), environ.get(f"{OTLP_PREFIX}ENDPOINT")
    endpoint = own or common
    exporter = _one_of(environ, (f"OTEL_{name}_EXPORTER",), EXPORTERS)
    if not endpoint or exporter == "none":
        return None
    protocol = _one_of(
        environ, (f"{OTLP_PREFIX}{name}_PROTOCOL", f"{OTLP_PREFIX}PROTOCOL"), (PROTOCOL_GRPC, PROTOCOL_HTTP)
    )
    if protocol == PROTOCOL_HTTP:
        if not endpoint.startswith(("http://", "https://")):
            variable = f"{OTLP_PREFIX}{name}_ENDPOINT" if own else f"{OTLP_PREFIX}ENDPOINT"
            raise Unavailable(f"{variable} is {quote(endpoint)}", "write it as in http://collector:4318")
        if not own:
            endpoint = f"{endpoint.rstrip('/')}/v1/{name.lower()}"
    for kind in TLS_FILES:
        for variable in (f"{OTLP_PREFIX}{name}_{kind}", f"{OTLP_PREFIX}{kind}"):
            path = environ.get(variable)
            if path and not os.access(Path(path), os.R_OK):
                raise Unavailable(
                    f"{variable} names {quote(path)}, which cannot be read", "correct the path, or unset it"
                )
    common_ms = _milliseconds(environ, f"{OTLP_PREFIX}TIMEOUT", TIMEOUT_MS)
    return OtlpSignal(
        endpoint=endpoint,
        protocol=protocol,
        compression=_one_of(environ, (f"{OTLP_PREFIX}{name}_COMPRESSION", f"{OTLP_PREFIX}COMPRESSION"), COMPRESSIONS),
        every_s=_milliseconds(environ, *every) / 1000,
        timeout_s=_milliseconds(environ, f"{OTLP_PREFIX}{name}_TIMEOUT", common_ms) / 1000,
        certificate=bool(environ.get(f"{OTLP_PREFIX}{name}_CERTIFICATE") or environ.get(f"{OTLP_PREFIX}CERTIFICATE")),
    )


def _one_of(environ: Mapping[str, str], variables: tuple[str, ...], supported: tuple[str, ...]) -> str:
    """Return the value of the first variable that is set. The first supported value is the default."""
    for variable in variables:
        value = environ.get(variable, "").strip().lower()
        if value and value not in supported:
            raise Unavailable(f"{variable} is {quote(value)}", f"set it to {' or '.join(supported)}")
        if value:
            return value
    return supported[0]


def _milliseconds(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit() and MIN_INTERVAL_MS <= int(text) <= MAX_INTERVAL_MS):
        raise Unavailable(
            f"{name} is {quote(text)}", f"write milliseconds, from {MIN_INTERVAL_MS} to {MAX_INTERVAL_MS}"
        )
    return int(text)
