"""A stock kube-scheduler and its extender, with the configuration and the rights that the chart renders."""

from __future__ import annotations

import json
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from deploy import chart
from tests.cluster.binaries import compiled_program, obtain
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import PATIENCE
from tests.cluster.names import CONTROL
from tests.cluster.programs import Program, as_account
from tests.cluster.server import Server
from tests.cluster.service_accounts import Account

EXTENDER_PORT = 9317
SCHEDULER_NAME = "katalyst-scheduler"
RBAC_KINDS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
NAMESPACE = "dioptase-scheduler-tests"


def rendered_manifests() -> list[dict[str, Any]]:
    """Return what helm makes of the scheduler's templates. Raises CalledProcessError."""
    command = [
        str(compiled_program("helm")), "template", "dioptase", str(chart.CHART_DIR), "--namespace", NAMESPACE,
        "--kube-version", chart.KUBE_VERSION, "--set=scheduler.enabled=true", "--set=tls.secretName=any",
        "--set=tokenReview=false", "--show-only=templates/scheduler.yaml", "--show-only=templates/scheduler-rbac.yaml",
    ]  # fmt: skip
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [item for item in map(msgspec.yaml.decode, text.split("\n---\n")) if item]


class ExtendedScheduler:
    """A kube-scheduler and the extender in the network namespace of the control plane, as in one pod."""

    def __init__(self, cluster: Cluster, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self._cluster = cluster
        cluster.programs.update(obtain())
        manifests = rendered_manifests()
        self._grant(manifests)
        account = Account(cluster, "dioptase-scheduler", NAMESPACE, folder, bound=True)
        self.extender = Extender(cluster, account, folder, settings or {})
        (data,) = (item["data"] for item in manifests if item["kind"] == "ConfigMap")
        config = msgspec.yaml.decode(data["kube-scheduler.yaml"])
        config["clientConnection"] = {"kubeconfig": str(account.kubeconfig)}
        self._config = folder / "kube-scheduler.json"
        self._config.write_text(json.dumps(config))

    def begin(self) -> None:
        """Start both and wait until the extender is ready."""
        self.extender.begin()
        space = self._cluster.names.space(CONTROL)
        program = self._cluster.programs["kube-scheduler"]
        words = (program, f"--config={self._config}", "--bind-address=127.0.0.1", "--secure-port=0", "--v=3")
        self._cluster.daemons.start(SCHEDULER_NAME, space, words)

    def restart_if_ended(self) -> None:
        """Start kube-scheduler again if it has ended, as a kubelet does: it ends when it cannot renew its Lease in time."""
        if self._cluster.daemons.pid(SCHEDULER_NAME) is None:
            self._cluster.daemons.again(SCHEDULER_NAME)

    def end(self) -> None:
        """Stop both, if they run."""
        for name in (SCHEDULER_NAME, self.extender.name):
            if self._cluster.daemons.pid(name) is not None:
                self._cluster.daemons.end(name)

    def _grant(self, manifests: list[dict[str, Any]]) -> None:
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        listed = [namespace, *(item for item in manifests if item["kind"] in RBAC_KINDS)]
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": listed})
        self._cluster.kubectl("apply", "-f", "-", text=text)


@contextmanager
def extended_scheduler(
    cluster: Cluster, server: Server, folder: Path, settings: Mapping[str, Any] | None = None
) -> Iterator[ExtendedScheduler]:
    """Run both, with the account that pods of their namespace need; `settings` are the extender's."""
    created = ExtendedScheduler(cluster, folder, settings)
    refused = server.refusal(
        "POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": "default"}}
    )
    assert refused is None or refused.status == 409  # where there are controllers, they have made it
    try:
        created.begin()
        yield created
    finally:
        created.end()


class Extender(Program):
    """The extender as a daemon."""

    def __init__(self, cluster: Cluster, account: Account, folder: Path, settings: Mapping[str, Any]) -> None:
        address = cluster.names.address(CONTROL)
        super().__init__(cluster, "extender", f"https://{address}:{EXTENDER_PORT}")
        config, web = folder / "extender.json", folder / "web.json"
        config.write_text(json.dumps(settings))
        authority = cluster.control.authority
        self._context = ssl.create_default_context(cafile=str(authority.certificate("ca")))
        self._context.check_hostname = False  # any certificate of the cluster's authority serves here
        files = {"cert_file": str(authority.certificate("apiserver")), "key_file": str(authority.key("apiserver"))}
        web.write_text(json.dumps({"tls_server_config": files}))
        self._space = cluster.names.space(CONTROL)
        self._words = (*as_account(account), "scheduler", "--listen", f"127.0.0.1,{address}:{EXTENDER_PORT}",
                       "--config", str(config), "--web-config", str(web))  # fmt: skip

    def text(self, path: str, body: bytes | None = None) -> str:
        """Return the response at a path, to a POST if there is a body. Raises OSError without one."""
        with urllib.request.urlopen(self.url + path, body, timeout=10 * PATIENCE, context=self._context) as answer:
            return str(answer.read().decode())

    def begin(self) -> None:
        """Start it and wait until everything is listed."""
        self._daemons.start(self.name, self._space, self._words)
        self.ready()

    def ready(self) -> None:
        self.wait("the extender", lambda: self.text("/readyz"), 60 * PATIENCE)
