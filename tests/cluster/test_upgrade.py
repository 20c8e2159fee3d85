"""Limits of a running batch pod through an upgrade, a rollback, a restart and an uninstallation of the chart."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.cluster import test_install
from tests.cluster.cgroups import hierarchies
from tests.cluster.daemons import wait
from tests.cluster.objects import a_pod
from tests.cluster.test_install import AGENT, NAMESPACE, RECLAIMED_MILLICPU, RELEASE, Installed, running

pytestmark = [pytest.mark.cluster]
installed = test_install.installed
"""The fixture of the release, which each module installs for itself."""


class PodLimits:
    """The limits of a batch pod that requests 50 millicores and 64 MiB of reclaimed resources, as the kernel holds them."""

    def __init__(self, installed: Installed) -> None:
        status = installed.server.ask("GET", "/api/v1/namespaces/installed/pods/limited")["status"]
        container = status["containerStatuses"][0]["containerID"].rpartition("/")[2]
        folders = [path for top in hierarchies() for path in top.glob(f"**/{container}")]
        files = {
            path.name: path for folder in folders for path in (*folder.glob("*.*"), *folder.parent.glob("cpu.idle"))
        }
        quota = files.get("cpu.cfs_quota_us") or files["cpu.max"]
        self._files = quota, files.get("memory.limit_in_bytes") or files["memory.max"], files["cpu.idle"]
        self._usage = files.get("cpuacct.usage") or files["cpu.stat"]

    def read(self) -> tuple[str, str, str]:
        """Return CPU quota and memory limit of the container, and whether its pod is idle."""
        quota, memory, idle = (file.read_text().split()[0] for file in self._files)
        return quota, memory, idle

    def used_s(self) -> float:
        """Return the CPU time of the container in seconds."""
        text = self._usage.read_text()
        return int(text) / 1e9 if text.strip().isdigit() else int(text.split()[1]) / 1e6

    def limited(self) -> bool:
        """Return whether all three are those of the agent; the policy may lower the quota further."""
        quota, memory, idle = self.read()
        return quota.isdigit() and 0 < int(quota) <= 5000 and memory == str(64 << 20) and idle == "1"

    def restored(self) -> bool:
        """Return whether all three are those of the kubelet, which enforces no limit of an extended resource."""
        quota, memory, idle = self.read()
        return quota in ("-1", "max") and (memory == "max" or int(memory) > 1 << 50) and idle == "0"


class LimitSampler:
    """Reads the limits ten times a second in a thread, while the block runs."""

    def __init__(self, limits: PodLimits) -> None:
        self._limits = limits
        self.samples = 0
        self.cores = 0.0
        """CPU that the container used on average."""
        self.lost: list[tuple[int, tuple[str, str, str]]] = []
        """Number and content of each sample in which a limit was not in force."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> LimitSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        begin_s, used_s = time.monotonic(), self._limits.used_s()
        while not self._stop.wait(0.1):
            self.samples += 1
            if not self._limits.limited():
                self.lost.append((self.samples, self._limits.read()))
        self.cores = (self._limits.used_s() - used_s) / (time.monotonic() - begin_s)


@pytest.fixture
def limits(installed: Installed) -> Iterator[PodLimits]:
    """The limits of a running batch pod that are in force."""
    amounts = {RECLAIMED_MILLICPU: "50", "resource.katalyst.kubewharf.io/reclaimed_memory": "64Mi"}
    resources = {"requests": amounts, "limits": amounts}
    pod = a_pod("limited", "reclaimed_cores", "trap exit TERM; while :; do :; done", resources)
    installed.server.ask("POST", "/api/v1/namespaces/installed/pods", pod)
    wait("the pod", lambda: running(installed.server, "installed", "limited"), 60)
    result = PodLimits(installed)
    wait("its limits", result.limited, 60)
    yield result
    installed.cluster.kubectl("--namespace", "installed", "delete", "pod", "limited", "--timeout=60s")


def agent_pod(installed: Installed) -> str:
    """Return the name of the agent's pod."""
    selector = "app.kubernetes.io/component=agent"
    name = installed.cluster.kubectl("--namespace", NAMESPACE, "get", "pods", "--selector", selector, "--output=name")
    return name.strip()


def test_limits_stay_in_force_through_an_upgrade_a_rollback_and_a_restart(
    installed: Installed, limits: PodLimits
) -> None:
    with LimitSampler(limits) as sampler:
        pods = [agent_pod(installed)]
        installed.upgrade("agent.settings.intervalS=2")
        pods.append(agent_pod(installed))
        adopted = [handed_over(installed)]
        installed.helm("rollback", RELEASE, "1")
        installed.settled()
        pods.append(agent_pod(installed))
        adopted.append(handed_over(installed))
        # As the kubelet does after failed liveness probes: the pod stays, its container is a new one.
        os.kill(int((installed.state / "holder.pid").read_text()), signal.SIGTERM)
        wait("the restart", lambda: restarts(installed) == 1, 60)
        installed.settled()
        adopted.append(handed_over(installed))
    assert len(set(pods)) == 3
    assert all(count >= 3 for count in adopted), adopted
    assert sampler.samples > 50
    assert sampler.lost == []
    # With the kubelet's values it would use a whole core whenever the online pods leave one.
    assert 0 < sampler.cores < 0.06


def handed_over(installed: Installed) -> int:
    """Wait until the agent's log names the values that it has adopted, and return their number."""
    wait("the adoption", lambda: adopted_values(installed) is not None, 60)
    return adopted_values(installed) or 0


def adopted_values(installed: Installed) -> int | None:
    log = installed.cluster.kubectl("--namespace", NAMESPACE, "logs", f"daemonset/{AGENT}")
    match = re.search(r"The previous agent handed over (\d+) changed values", log)
    return None if match is None else int(match[1])


def restarts(installed: Installed) -> int:
    pods = installed.server.ask(
        "GET", f"/api/v1/namespaces/{NAMESPACE}/{agent_pod(installed).replace('pod/', 'pods/')}"
    )
    return int(pods["status"]["containerStatuses"][0]["restartCount"])


def test_an_agent_that_does_not_act_any_more_restores_adopted_values(installed: Installed, limits: PodLimits) -> None:
    installed.upgrade("profile=observe")
    try:
        wait("the originals", limits.restored, 60)
    finally:
        installed.helm("rollback", RELEASE, "1")
        installed.settled()
    wait("the limits", limits.limited, 60)


@pytest.mark.long
def test_an_uninstallation_restores_what_earlier_agents_have_handed_over(
    installed: Installed, limits: PodLimits
) -> None:
    installed.helm("uninstall", RELEASE, "--wait", "--timeout=240s")
    assert limits.restored(), limits.read()
    assert not (installed.state / "originals.json").exists()
    assert not (installed.state / "handover.json").exists()
