"""Pods for every test: `pod`, and `shared`, `dedicated` and `reclaimed` for the three usual QoS levels.

A module with other conventions (cgroup, uid, container name) binds them once with functools.partial or a small wrapper.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from api.pod import Container, Pod
from api.qos import QoSLevel


def pod(
    name: str,
    qos: QoSLevel = QoSLevel.SHARED,
    *,
    namespace: str = "default",
    uid: str = "",
    cgroup: str | None = None,
    container: str = "",
    cpu_request: float | None = None,
    cpu_limit: float | None = None,
    memory_request: int | None = None,
    memory_limit: int | None = None,
    **fields: Any,
) -> Pod:
    """Return a running pod with one container. Requests of a reclaimed pod are its reclaimed resources; `fields` are of Pod."""
    reclaimed_pod = qos is QoSLevel.RECLAIMED
    running = Container(
        name=container or name,
        cgroup=f"/{name}" if cgroup is None else cgroup,
        cpu_request_cores=None if reclaimed_pod else cpu_request,
        cpu_limit_cores=cpu_limit,
        memory_request_bytes=None if reclaimed_pod else memory_request,
        memory_limit_bytes=memory_limit,
        reclaimed_cpu_cores=cpu_request if reclaimed_pod else None,
        reclaimed_memory_bytes=memory_request if reclaimed_pod else None,
    )
    return Pod(
        uid=uid or f"{namespace}/{name}", namespace=namespace, name=name, qos=qos,
        **{"containers": (running,), **fields},
    )  # fmt: skip


shared = partial(pod, qos=QoSLevel.SHARED)
dedicated = partial(pod, qos=QoSLevel.DEDICATED)
reclaimed = partial(pod, qos=QoSLevel.RECLAIMED)
