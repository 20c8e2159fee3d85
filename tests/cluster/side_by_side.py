"""A declared node of eight CPUs with two pods that do not run, watched by both agents: for tests and for the benchmark."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster import fake_cpu_topology
from tests.cluster.binaries import HERE
from tests.cluster.cluster import Cluster, create_cluster
from tests.cluster.daemons import wait
from tests.cluster.names import CONTROL
from tests.cluster.stock_katalyst import (
    ADVISOR,
    DIOPTASE,
    ORM,
    QRM,
    REPORTER,
    STAND_IN,
    KatalystAndDioptase,
    Place,
    obtain_katalyst,
)

CPUS = 8
NODE = "peer"
NOWHERE = "/dioptase-nobody"
"""Path of no cgroup, so that Katalyst's writes for reclaimed pods have no effect."""
RESOURCE_PREFIX = "resource.katalyst.kubewharf.io/reclaimed_"
ROOT_FLAG = f"--reclaim-relative-root-cgroup-path={NOWHERE}"
ADVISED = tuple(f"--{kind}-resource-plugin-advisor=true" for kind in ("cpu", "memory"))


def pod(name: str, qos: str, requests: dict[str, str]) -> dict[str, Any]:
    """Return a pod as the kubelet lists it."""
    container = {"name": "main", "image": "none", "resources": {"requests": requests, "limits": {}}}
    text = {"name": "main", "ready": True, "containerID": f"containerd://{name}", "state": {"running": {}}}
    annotations = {"katalyst.kubewharf.io/qos_level": qos, "cgroup.dioptase.io/main": f"{NOWHERE}/{name}"}
    return {
        "metadata": {"name": name, "namespace": "default", "uid": str(uuid.uuid4()), "annotations": annotations},
        "spec": {"nodeName": NODE, "containers": [container]},
        "status": {"phase": "Running", "containerStatuses": [text]},
    }


WEB = pod("web", "shared_cores", {"cpu": "500m", "memory": "64Mi"})
BATCH = pod("batch", "reclaimed_cores", {f"{RESOURCE_PREFIX}millicpu": "200", f"{RESOURCE_PREFIX}memory": "64Mi"})
PODS = {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": [WEB, BATCH]}


@contextmanager
def stand(cluster: Cluster, program: Path) -> Iterator[KatalystAndDioptase]:
    """Yield the node, in the API server's network namespace; both agents are ended afterwards."""
    folder = cluster.names.run / uuid.uuid4().hex[:4]
    fake_cpu_topology.write_topology(folder / "machine", CPUS)
    place = Place(
        cluster.names.space(CONTROL),
        cluster.names.address(CONTROL),
        fake_cpu_topology.mount_command(folder / "machine"),
    )
    dioptase = KatalystAndDioptase(cluster, place, program, folder / "k", NODE)
    pods_file(dioptase).write_text(json.dumps(PODS))
    cluster.server.ask("POST", "/api/v1/nodes", {"metadata": {"name": NODE}})
    try:
        dioptase.start(STAND_IN, "python3", HERE / "fake_kubelet.py", "0.0.0.0", pods_file(dioptase))
        yield dioptase
    finally:
        dioptase.end()
        cluster.server.ask("DELETE", f"/api/v1/nodes/{NODE}")


def found_by_orm(dioptase: KatalystAndDioptase) -> str:
    """Return the option that makes Katalyst's ORM look for plugins where its QRM's are."""
    return f"--plugin-registration-dir={dioptase.folder}/qrm"


def pods_file(dioptase: KatalystAndDioptase) -> Path:
    return dioptase.folder.parent / "pods.json"


def settings(**sockets: list[str]) -> dict[str, Any]:
    return {
        "advisor": {"policy": "canonical", "minShareCores": 2},
        "memory": {"reclaimRoot": NOWHERE},
        "placing": {"rampUpS": 0},
        "report": {"periodS": 5, "windowS": 10},
        "sockets": sockets,
    }


def start_ours(dioptase: KatalystAndDioptase, *options: str, **sockets: list[str]) -> None:
    dioptase.start_ours(settings(**sockets), "--pods", str(pods_file(dioptase)), "--act", "dry-run", *options)


@contextmanager
def both() -> Iterator[Mapping[str, int]]:
    """Run all parts of Katalyst that can run together, and dioptase with Malachite, both socket protocols and the API server;
    yield the process ids by name once both have reported."""
    program = obtain_katalyst()
    cluster = create_cluster(0)
    try:
        folder = HERE.parents[1] / "deploy/crds"
        cluster.kubectl("apply", "--server-side", "-f", folder)
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", folder)
        with stand(cluster, program) as other:
            start_ours(other, "--node", NODE, serve=["pod-resources", "resource-plugins"])
            other.start_stock("katalyst-agent", [ADVISOR, ORM, *QRM], *ADVISED, ROOT_FLAG, found_by_orm(other))
            other.start_stock("katalyst-reporter", [REPORTER], "--enable-metrics-fetcher=false", found_by_orm(other))
            wait("their zones", lambda: other.cnr()["status"]["topologyZone"], 60)
            wait("their pods", lambda: WEB["metadata"]["uid"] in other.state("cpu")["pod_entries"], 60)
            result = {name: cluster.daemons.pid(name) for name in (DIOPTASE, "katalyst-agent", "katalyst-reporter")}
            yield {name: pid for name, pid in result.items() if pid is not None}
    finally:
        cluster.release()
