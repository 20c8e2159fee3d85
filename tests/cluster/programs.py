"""The product's programs on a cluster: `dioptase agent` on a node, `dioptase controller` next to the control plane, as daemons
that can be killed and restarted."""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.daemons import PATIENCE
from tests.cluster.names import CONTROL
from tests.cluster.node import Node
from tests.cluster.service_accounts import Account

CODE = Path(__file__).resolve().parents[2]
AGENT_PORT, CONTROLLER_PORT = 9102, 9316


class Program:
    """One program of the product as a daemon, with its HTTP server."""

    def __init__(self, cluster: Cluster, name: str, url: str) -> None:
        self._daemons, self.name, self.url = cluster.daemons, name, url

    def again(self) -> None:
        """Start it again with the same command."""
        self._daemons.again(self.name)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send it a signal and wait for its end."""
        self._daemons.end(self.name, number, seconds=60)

    @property
    def pid(self) -> int | None:
        return self._daemons.pid(self.name)

    @property
    def log(self) -> str:
        return self._daemons.log(self.name).read_text(errors="replace")

    def text(self, path: str) -> str:
        """Return the response at a path. Raises OSError without one."""
        with urllib.request.urlopen(self.url + path, timeout=10 * PATIENCE) as answer:
            return str(answer.read().decode())

    def ask(self, path: str) -> Any:
        return json.loads(self.text(path))

    def wait(self, what: str, probe: Any, seconds: float = 60) -> None:
        """Wait until the probe is true. Raises Late with the end of its log, at once if it has ended."""
        self._daemons.wait(self.name, probe, seconds)


class Agent(Program):
    """The agent of a node. Pods come from the node's own kubelet and containerd."""

    def __init__(
        self, cluster: Cluster, node: Node, account: Account, folder: Path,
        settings: Mapping[str, Any] | None = None, options: Sequence[str] = ("--act", "dry-run"),
    ) -> None:  # fmt: skip
        super().__init__(cluster, f"{node.name}-agent", f"http://{node.address}:{AGENT_PORT}")
        self.state = folder / f"{node.name}-state"
        # The user that runs it owns its state directory; no other process writes there.
        self.state.mkdir(mode=0o700, exist_ok=True)
        kubelet = {
            "url": f"https://{node.address}:10250", "tokenFile": str(account.token), "caFile": str(account.authority),
            "cgroupRoot": node.cgroup_root,
        }  # fmt: skip
        self._config = folder / f"{node.name}-agent.json"
        self._config.write_text(json.dumps({"kubelet": kubelet, **(settings or {})}))
        self._words = (
            *as_account(account), "agent", "--kubelet", "--node", node.name, "--listen", f"{node.address}:{AGENT_PORT}",
            "--state-dir", str(self.state), "--config", str(self._config), *options,
        )  # fmt: skip
        self._cluster, self._node = cluster, node

    def begin(self) -> None:
        """Start it and wait for its second cycle, which has rates."""
        space = self._cluster.names.space(self._node.name)
        self._daemons.start(self.name, space, self._node.words(*self._words))
        self.ready()

    def ready(self) -> None:
        self.wait(self.name, lambda: self.view()["seq"] >= 2)

    def view(self) -> Any:
        """Return the latest cycle."""
        return self.ask("/api/v1/view")

    def troubles(self) -> dict[str, str]:
        """Return the errors of the failing sources by name."""
        return {item["name"]: item["error"] for item in self.view()["sources"] if not item["ok"]}


class Controller(Program):
    """One replica of the controller."""

    def __init__(
        self, cluster: Cluster, account: Account, folder: Path, number: int = 1,
        settings: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        port = CONTROLLER_PORT + number
        address = f"{cluster.names.address(CONTROL)}:{port}"
        super().__init__(cluster, f"controller{number}", f"http://{address}")
        config = folder / f"controller{number}.json"
        config.write_text(json.dumps(settings or {}))
        self._cluster = cluster
        self._words = (*as_account(account), "controller", "--listen", address, "--config", str(config))

    def begin(self) -> None:
        """Start it and wait until it is ready: on standby, or leading with all objects listed."""
        self._daemons.start(self.name, self._cluster.names.space(CONTROL), self._words)
        self.ready()

    def ready(self) -> None:
        self.wait(self.name, lambda: self.text("/readyz"))

    @property
    def leads(self) -> bool:
        """Return whether it reports to be the leader; False without an answer."""
        try:
            return "\ndioptase_controller_leading 1.0\n" in self.text("/metrics")
        except OSError:
            return False


def as_account(account: Account) -> tuple[str, ...]:
    """Return the command `dioptase` of this tree with the credentials of an account."""
    program = str(Path(sys.executable).with_name("dioptase"))
    return ("env", f"PYTHONPATH={CODE}", f"KUBECONFIG={account.kubeconfig}", program)
