"""The source of pods: a kubelet and a runtime on real sockets that come and go, and what a cycle reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent.sensors.pods.cri_client import ContainerRuntimeClient
from agent.sensors.pods.kubelet_client import KubeletClient
from agent.sensors.pods.kubelet_pods import KubeletPodSource
from agent.sensors.pods.pod_join import PodJoinContext
from agent.sensors.pods.pod_spec import PodParsingContext
from api.interfaces import Unavailable
from tests.agent.sensors.pods.kubelet_objects import Cgroups, listing, pod
from tests.agent.sensors.pods.test_cri_client import Containerd
from tests.agent.sensors.pods.test_kubelet_client import serving, settings


class Lab:
    """A node: its kubelet answers `status` and `pods`, its clock stands where a test put it."""

    def __init__(self, tmp_path: Path) -> None:
        self.cgroups = Cgroups(tmp_path)
        self.pods: list[dict[str, Any]] = []
        self.status = 200
        self.body: bytes | None = None
        self.requests = 0
        self.now_s = 100.0
        self.containerd = Containerd()
        self.source: KubeletPodSource
        self.served: Any = None

    async def kubelet(self, _request: web.Request) -> web.Response:
        self.requests += 1
        return web.Response(status=self.status, body=listing(*self.pods) if self.body is None else self.body)

    def start(self, name: str, **changes: Any) -> str:
        """A pod that runs."""
        self.pods.append(pod(name, **changes))
        self.containerd.run(name, "main", f"{name}-main")
        return self.cgroups.make(f"uid-{name}", f"{name}-main")

    async def poll(self) -> None:
        """Poll so late that the kubelet is polled too, whatever runs."""
        self.now_s += 5
        await self.source.poll()

    def keys(self) -> list[str]:
        return [each.key for each in self.source.read()]

    def problem(self) -> str:
        problem = self.source.kubelet.problem()
        return problem.reason if problem is not None else ""


@asynccontextmanager
async def lab_of(tmp_path: Path, *, runtime: bool = True, **changes: Any) -> AsyncIterator[Lab]:
    (tmp_path / "cgroup").mkdir()
    lab = Lab(tmp_path / "cgroup")
    async with serving(lab.kubelet) as url:
        config = settings(url, **changes)
        peer = None
        if runtime:
            lab.served = await lab.containerd.serve(tmp_path / "c.sock")
            peer = ContainerRuntimeClient(tmp_path / "c.sock", 1)
        node = PodJoinContext(parsing=PodParsingContext(), exists=lab.cgroups.exists)
        try:
            async with KubeletClient(config) as kubelet:
                lab.source = KubeletPodSource(kubelet, peer, node, config, lambda: lab.now_s)
                yield lab
        finally:
            if peer is not None:
                await peer.close()
                await lab.served.stop()


async def test_before_the_first_list_there_is_none(tmp_path: Path) -> None:
    async with lab_of(tmp_path) as lab:
        with pytest.raises(Unavailable, match="was not polled yet"):
            lab.source.read()
        lab.status = 403
        await lab.poll()
        with pytest.raises(Unavailable, match="answered 403") as refused:
            lab.source.read()
        assert "nodes/proxy" in refused.value.remedy
        lab.status = 200
        web_ = lab.start("web")
        await lab.poll()
        (result,) = lab.source.read()
        assert [each.cgroup for each in result.containers] == [web_]
        assert lab.source.read() is lab.source.read()


async def test_a_new_pod_is_seen_with_the_next_look_and_nothing_new_makes_nothing_new(tmp_path: Path) -> None:
    async with lab_of(tmp_path) as lab:
        lab.start("web")
        await lab.source.poll()
        before = lab.source.read()
        lab.pods.reverse()
        await lab.poll()
        assert lab.source.read() is before
        lab.start("batch")
        await lab.source.poll()
        assert lab.keys() == ["shop/batch", "shop/web"]


async def test_the_kubelet_rests_while_the_runtime_has_nothing_new(tmp_path: Path) -> None:
    async with lab_of(tmp_path) as lab:
        lab.start("web")
        requests = []
        for _second in range(12):
            await lab.source.poll()
            requests.append(lab.requests)
            lab.now_s += 1
        assert requests == [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3]
        lab.start("batch")
        await lab.source.poll()
        assert (lab.requests, lab.keys()) == (4, ["shop/batch", "shop/web"])
        lab.containerd.run("web", "main", "again", created_at=9)
        new = lab.cgroups.make("uid-web", "again")
        await lab.source.poll()
        assert (lab.requests, lab.source.read()[1].containers[0].cgroup) == (5, new)


async def test_a_runtime_without_events_is_reported_and_polled_anyway(tmp_path: Path) -> None:
    async with lab_of(tmp_path, intervalS=0.2, events=True) as lab:
        lab.start("web")
        await lab.served.stop()
        lab.served = await lab.containerd.serve(tmp_path / "c.sock", events=False)
        running = asyncio.create_task(lab.source.run())
        async with asyncio.timeout(20):
            while (problem := lab.source.runtime.problem()) is None or "events: false" not in problem.remedy:
                await asyncio.sleep(0.02)
        assert "GetContainerEvents is not offered" in problem.reason
        assert lab.keys() == ["shop/web"]
        running.cancel()
        await asyncio.wait([running])


async def test_while_the_kubelet_is_away_its_last_list_counts_and_then_no_more(tmp_path: Path) -> None:
    async with lab_of(tmp_path, staleS=30) as lab:
        lab.start("web")
        await lab.source.poll()
        lab.status = 500
        lab.now_s += 12
        await lab.source.poll()
        assert lab.keys() == ["shop/web"]
        assert lab.problem().endswith("(the list of pods is 12 s old)")
        lab.now_s += 19
        with pytest.raises(Unavailable, match=r"answered 500.* \(the list of pods is 31 s old\)"):
            lab.source.read()
        lab.status = 200
        await lab.source.poll()
        assert (lab.keys(), lab.problem()) == (["shop/web"], "")


async def test_a_restarted_kubelet_removes_no_pod(tmp_path: Path) -> None:
    """It lists no pods, then those of its files, and the others once the API server lists them."""
    async with lab_of(tmp_path, staleS=30) as lab:
        lab.start("web")
        static = {"annotations": {"kubernetes.io/config.source": "file"}}
        lab.start("etcd", **static)
        complete = lab.pods
        await lab.poll()
        for some in ([], complete[1:], complete):
            lab.pods = some
            await lab.poll()
            assert (lab.keys(), lab.problem()) == (["shop/etcd", "shop/web"], "")


async def test_an_agent_and_a_kubelet_that_start_together_wait_for_the_list(tmp_path: Path) -> None:
    async with lab_of(tmp_path, staleS=30) as lab:
        lab.start("web")
        complete, lab.pods = lab.pods, []
        await lab.poll()
        with pytest.raises(
            Unavailable, match=r"lists no pod of the API server, and does not list 1 running pods such as shop/web"
        ) as waiting:
            lab.source.read()
        assert "restarted kubelet" in waiting.value.remedy
        lab.pods = complete
        await lab.poll()
        assert lab.keys() == ["shop/web"]


async def test_an_empty_node_is_no_kubelet_that_was_just_started(tmp_path: Path) -> None:
    async with lab_of(tmp_path) as lab:
        await lab.poll()
        assert (lab.keys(), lab.problem()) == ([], "")


async def test_a_running_pod_that_is_not_listed_is_reported_at_the_second_poll(tmp_path: Path) -> None:
    async with lab_of(tmp_path) as lab:
        lab.start("web")
        lab.containerd.run("orphan", "main", "o")
        await lab.poll()
        assert lab.problem() == ""
        await lab.poll()
        assert (lab.keys(), lab.problem()) == (
            ["shop/web"],
            "the kubelet does not list these running pods: shop/orphan",
        )


async def test_containers_with_another_cgroup_root_are_reported_with_the_setting(tmp_path: Path) -> None:
    async with lab_of(tmp_path) as lab:
        lab.cgroups.remove(lab.start("web"))
        await lab.poll()
        await lab.poll()
        assert lab.problem() == "no cgroup of shop/web/main"
        problem = lab.source.kubelet.problem()
        assert problem is not None
        assert "kubelet.cgroupRoot" in problem.remedy


async def test_a_runtime_that_is_away_is_a_source_that_failed_and_statuses_go_on(tmp_path: Path) -> None:
    async with lab_of(tmp_path, staleS=30) as lab:
        first = lab.start("web")
        await lab.source.poll()
        await lab.served.stop()
        lab.now_s += 31
        second = lab.cgroups.make("uid-batch", "batch-main")
        lab.pods.append(pod("batch"))
        await lab.source.poll()
        problem = lab.source.runtime.problem()
        assert problem is not None
        assert problem.reason.endswith("(the list of containers is 31 s old)")
        assert [each.cgroup for item in lab.source.read() for each in item.containers] == [second, first]
        assert [probe.name for probe in lab.source.reporters()] == ["kubelet", "container-runtime"]


async def test_without_a_runtime_the_kubelet_alone_is_a_source(tmp_path: Path) -> None:
    async with lab_of(tmp_path, runtime=False) as lab:
        path = lab.start("web")
        await lab.poll()
        assert [each.cgroup for each in lab.source.read()[0].containers] == [path]
        assert [(probe.name, probe.form, probe.problem()) for probe in lab.source.reporters()] == [
            ("kubelet", "http", None)
        ]


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"items":' + b"[" * 100_000])
async def test_an_answer_that_is_no_list_leaves_the_last_one_in_force(tmp_path: Path, body: bytes) -> None:
    async with lab_of(tmp_path) as lab:
        lab.start("web")
        await lab.poll()
        lab.body = body
        await lab.poll()
        assert lab.keys() == ["shop/web"]
        assert "not a list of pods" in lab.problem()


async def test_an_unreadable_pod_is_reported_and_the_others_are_listed(tmp_path: Path) -> None:
    async with lab_of(tmp_path) as lab:
        lab.start("web")
        lab.pods.append(pod("odd", priority="high"))
        await lab.poll()
        assert lab.keys() == ["shop/web"]
        assert lab.problem() == ("some pods cannot be read: items[1].spec.priority: Expected `int | null`, got `str`")


async def test_it_looks_every_interval_and_at_once_on_an_event(tmp_path: Path) -> None:
    async with lab_of(tmp_path, intervalS=60, staleS=600, events=True) as lab:
        running = asyncio.create_task(lab.source.run())
        for number in range(1, 4):
            lab.start(f"p{number}")
            lab.containerd.events.put_nowait("new")
            async with asyncio.timeout(20):
                while len(lab.source.reporters()) and (not lab.requests or len(lab.source._pods) < number):
                    await asyncio.sleep(0.02)
        assert lab.keys() == ["shop/p1", "shop/p2", "shop/p3"]
        running.cancel()
        await asyncio.wait([running])


async def test_it_goes_on_after_a_look_that_failed_unforeseen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with lab_of(tmp_path, intervalS=0.2) as lab:
        lab.start("web")
        broken, lab.cgroups.root = lab.cgroups.root, None  # type: ignore[assignment]
        running = asyncio.create_task(lab.source.run())
        async with asyncio.timeout(20):
            while lab.requests < 4:
                await asyncio.sleep(0.02)
            assert caplog.text.count("polling the pods failed") == 1
            assert lab.problem().startswith("TypeError: ")
            lab.cgroups.root = broken
            while not lab.source._pods:
                await asyncio.sleep(0.02)
        assert lab.keys() == ["shop/web"]
        running.cancel()
        await asyncio.wait([running])
