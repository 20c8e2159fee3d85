"""The control plane of a cluster in a namespace of its own: etcd, the API server, and on demand controllers and scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.cluster import audit
from tests.cluster.credentials import Authority
from tests.cluster.daemons import Daemons
from tests.cluster.names import CONTROL, PORT, SERVICES, Names
from tests.cluster.server import Server

ETCD = "http://127.0.0.1:2379"
API_SERVER, CONTROLLERS, SCHEDULER = "kube-apiserver", "kube-controller-manager", "kube-scheduler"


class Control:
    """The control plane of one cluster; `programs` has the paths of its programs."""

    def __init__(self, names: Names, programs: Mapping[str, Path], daemons: Daemons) -> None:
        self._names, self._programs, self._daemons = names, programs, daemons
        self.authority = Authority(names)

    def begin(self) -> None:
        """Start etcd and the API server, ready for requests."""
        self.authority.create()
        self.authority.kubeconfig("admin")
        # What a crash of this machine would lose is no loss.
        self._start("etcd", "--data-dir", self._names.run / "etcd", "--unsafe-no-fsync", "--listen-client-urls", ETCD,
                    "--advertise-client-urls", ETCD, "--listen-peer-urls", "http://127.0.0.1:2380")  # fmt: skip
        self._start(API_SERVER, *self._words())
        self.ready()

    def ready(self) -> None:
        """Wait for the API server. Raises Late with its log."""
        server = self.server()
        self._daemons.wait(API_SERVER, lambda: server.text("GET", "/readyz") == "ok", 120)

    def server(self) -> Server:
        """Return the API server with an administrator's certificate."""
        pki = self.authority
        return Server(self._names.server, pki.certificate("ca"), pki.certificate("admin"), pki.key("admin"))

    def govern(self) -> None:
        """Start controllers and scheduler, one of each, so without leases."""
        pki = self.authority
        admin = self._names.run / "admin.kubeconfig"
        self._start(
            CONTROLLERS, f"--kubeconfig={admin}", "--use-service-account-credentials", "--leader-elect=false",
            f"--service-account-private-key-file={pki.key('accounts')}", f"--root-ca-file={pki.certificate('ca')}",
            f"--cluster-signing-cert-file={pki.certificate('ca')}", f"--cluster-signing-key-file={pki.key('ca')}",
            "--bind-address=127.0.0.1",
        )  # fmt: skip
        self._start(SCHEDULER, f"--kubeconfig={admin}", "--leader-elect=false", "--bind-address=127.0.0.1")

    def resume(self) -> None:
        """Start everything again with its recorded command, after a reboot of this machine."""
        for name in ("etcd", API_SERVER):
            self._daemons.again(name)
        self.ready()
        for name in (CONTROLLERS, SCHEDULER):
            self._daemons.again(name)

    def _start(self, name: str, *words: object) -> None:
        self._daemons.start(name, self._names.space(CONTROL), (self._programs[name], *words))

    def _words(self) -> list[str]:
        """Return the options of the API server."""
        pki, address = self.authority, self._names.address(CONTROL)
        return [
            f"--etcd-servers={ETCD}",
            f"--bind-address={address}",
            f"--advertise-address={address}",
            f"--secure-port={PORT}",
            f"--service-cluster-ip-range={SERVICES}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            *audit.words(self._names.run),
            f"--client-ca-file={pki.certificate('ca')}",
            f"--tls-cert-file={pki.certificate('apiserver')}",
            f"--tls-private-key-file={pki.key('apiserver')}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki.key('accounts')}",
            f"--service-account-signing-key-file={pki.key('accounts')}",
            f"--kubelet-client-certificate={pki.certificate('admin')}",
            f"--kubelet-client-key={pki.key('admin')}",
            # There is no DNS for the names of nodes, and no kube-proxy here for the addresses of services.
            "--kubelet-preferred-address-types=InternalIP",
            "--enable-aggregator-routing=true",
            f"--requestheader-client-ca-file={pki.certificate('ca')}",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki.certificate('front-proxy')}",
            f"--proxy-client-key-file={pki.key('front-proxy')}",
        ]
