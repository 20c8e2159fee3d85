"""What it takes to run the stock client here."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from tests.kernel.real_cgroups import require_writable_cgroups
from tests.malachite import stock_client
from tests.malachite.node import clear_leftovers


@pytest.fixture(scope="session")
def program() -> Path:
    return stock_client.build()


@pytest.fixture(scope="session")
def hierarchy() -> Hierarchy:
    actual = require_writable_cgroups()
    if actual.mode == "v2":
        pytest.skip("the reads of this test are of version 1 files")
    clear_leftovers(actual)
    if (actual.primary / "kubepods").exists():
        pytest.skip("a kubelet has its pods in /kubepods here, and the client asks for no others")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", stock_client.PORT))
        except OSError:
            pytest.skip(f"port {stock_client.PORT}, the only one that the client asks, is taken")
    return actual
