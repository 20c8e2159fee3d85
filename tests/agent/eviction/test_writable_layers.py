"""Use of writable layers, over a real socket: summed by pod, valid for a minute, requested only if a plugin needs layers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent.advisor.engine import PolicyState
from agent.config.eviction import FilesystemThreshold, RootfsPressureConfig
from agent.eviction import writable_layers
from agent.eviction.eviction_inputs import RootfsUse
from agent.eviction.runner import EvictionRunner
from agent.eviction.writable_layers import POD_UID_LABEL, WritableLayers
from api.proto import cri_runtime_pb2 as wire
from api.snapshot import Filesystem
from api.units import GIB
from common.grpc_unix import GrpcService, serve_on_socket
from tests.agent.eviction.builders import S, situation
from tests.agent.eviction.test_runner import BATCH, FakePodEvictor, config
from tests.agent.sensors.pods.test_cri_client import SERVICE

PRESSURE = "rootfs-pressure-eviction-plugin"
SIX_GIB = RootfsPressureConfig(mount="/", minimum_free=FilesystemThreshold(number=6 * GIB))


def stats(uid: str, size: int, inodes: int, at_ns: int = 1) -> wire.ContainerStats:
    stats = wire.ContainerStats(attributes=wire.ContainerAttributes(labels={POD_UID_LABEL: uid} if uid else {}))
    stats.writable_layer.timestamp = at_ns
    stats.writable_layer.used_bytes.value, stats.writable_layer.inodes_used.value = size, inodes
    return stats


class Runtime:
    """A runtime with these statistics of containers."""

    def __init__(self, *configuration: wire.ContainerStats) -> None:
        self.configuration, self.requests = configuration, 0

    async def answer(self, _request: Any, _words: Mapping[str, str]) -> wire.ListContainerStatsResponse:
        self.requests += 1
        return wire.ListContainerStatsResponse(stats=self.configuration)

    def service(self) -> GrpcService:
        return GrpcService(SERVICE, {"ListContainerStats": self.answer})


async def test_layers_are_summed_by_pod_and_valid_for_a_minute(tmp_path: Path) -> None:
    runtime = Runtime(
        stats("u-1", 4096, 3), stats("u-1", 8192, 1), stats("u-2", 1, 1), stats("u-3", 7, 7, at_ns=0), stats("", 9, 9),
        wire.ContainerStats(),
    )  # fmt: skip
    server = await serve_on_socket(tmp_path / "c.sock", (runtime.service(),))
    now = [100.0]
    layers = WritableLayers(tmp_path / "c.sock", 5, lambda: True, lambda: now[0])
    assert layers.use() == {}
    await layers.poll()
    expected = {"u-1": RootfsUse(used_bytes=12288, inodes=4), "u-2": RootfsUse(used_bytes=1, inodes=1)}
    assert (layers.use(), layers.problem()) == (expected, None)
    await server.stop()
    now[0] = 160.0
    await layers.poll()
    assert layers.use() == expected, "the last answer"
    problem = layers.problem()
    assert problem is not None
    assert "no server answers" in problem.reason
    now[0] = 160.1
    assert layers.use() == {}


async def test_without_a_plugin_the_runtime_is_not_polled(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writable_layers, "POLL_INTERVAL_S", 0.01)
    runtime, needed = Runtime(), [False]
    server = await serve_on_socket(tmp_path / "c.sock", (runtime.service(),))
    layers = WritableLayers(tmp_path / "c.sock", 5, lambda: needed[0])
    task = asyncio.create_task(layers.run())
    await asyncio.sleep(0.1)
    assert runtime.requests == 0
    needed[0] = True
    async with asyncio.timeout(20):
        while runtime.requests < 2:
            await asyncio.sleep(0.01)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await server.stop()


def test_the_use_of_layers_belongs_to_the_uid_of_the_pod() -> None:
    """5 GiB of 100 are free, 6 are the threshold; another pod had the name before."""
    configuration = config(PRESSURE)
    configuration = type(configuration)(
        eviction=type(configuration.eviction)(plugins=(PRESSURE,), rootfs_pressure=SIX_GIB)
    )
    room = Filesystem(size_bytes=100 * GIB, available_bytes=5 * GIB, inodes=1000, free_inodes=500)
    requests = []
    for uid in ("u-before", BATCH.uid):
        pod_evictor = FakePodEvictor()
        evictor = EvictionRunner(configuration, pod_evictor)
        assert evictor.is_enabled(PRESSURE)
        evictor.rootfs = lambda uid=uid: {uid: RootfsUse(used_bytes=GIB, inodes=1)}  # type: ignore[misc]
        snapshot_now = situation(
            100, [BATCH], samples={"batch": {"threads": 1}}, node={"filesystems": {"/": room}}
        ).snapshot
        result = evictor.run_cycle(snapshot_now, None, PolicyState(), 100 * S)
        assert result.thresholds[0].met.value == "hard"
        requests.append([key for key, _ in pod_evictor.evictions])
    assert requests == [[], ["default/batch"]]
