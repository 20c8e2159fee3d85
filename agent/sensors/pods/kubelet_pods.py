"""Provides the node's pods from the kubelet and the container runtime, polled in the background. A cycle never waits
for either: it reads the latest answer. While the kubelet is unreachable its last list stays in force; once that list is
older than `staleS`, `read` raises Unavailable."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from agent.config.kubelet import MAX_POLLS_WITHOUT_KUBELET, KubeletConfig
from agent.sensors.pods.kubelet_client import KubeletClient
from agent.sensors.pods.pod_join import (
    InvalidPodList,
    KubeletPod,
    KubeletPodList,
    NodePods,
    PodJoinContext,
    RuntimeContainers,
    decode_pod_list,
    join_pods,
)
from api.interfaces import HealthReporter, Unavailable
from api.pod import Pod
from api.text import join_first

if TYPE_CHECKING:
    from agent.sensors.pods.cri_client import ContainerRuntimeClient

log = logging.getLogger(__name__)
MIN_POLL_GAP_S = 0.25
"""Smallest time between two polls, however many events arrive."""
EVENTS_RETRY_S = 10.0
_MAX_NAMES_SHOWN = 3


class KubeletPodSource:
    """A PodSource (api.interfaces). `poll` polls once; `run` polls until it is cancelled."""

    def __init__(
        self,
        kubelet: KubeletClient,
        runtime: ContainerRuntimeClient | None,
        node: PodJoinContext,
        config: KubeletConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kubelet, self._runtime, self._node, self._config, self._clock = kubelet, runtime, node, config, clock
        self.keep_manifests = False
        """Whether `manifest` is needed; set it before the first poll."""
        self.kubelet = PodSourceHealth("kubelet", config.url.partition(":")[0], "list of pods", clock)
        self.runtime = PodSourceHealth(
            "container-runtime", str(runtime.socket) if runtime else "none", "list of containers", clock
        )
        self._listing, self._containers, self._joined = KubeletPodList(), RuntimeContainers(), NodePods()
        self._pods: tuple[Pod, ...] = ()
        self._unlisted: Mapping[str, str] = {}
        self._without_cgroup: frozenset[str] = frozenset()
        self._wake = asyncio.Event()
        self._poll_requested = False
        self._bug = ""

    def read(self) -> tuple[Pod, ...]:
        """Return the pods of the last answer, the same tuple until something changes. Raises Unavailable before the
        first list, and when the last one is stale."""
        age_s = self.kubelet.age_s()
        if age_s is not None and age_s <= self._config.stale_s:
            return self._pods
        old = "the kubelet was not polled yet" if age_s is None else f"the list of pods is {age_s:.0f} s old"
        raise self.kubelet.problem() or Unavailable(old, "wait a second, and see the agent's log")

    def listed(self, uid: str) -> KubeletPod | None:
        """Return a pod of the kubelet's last list. Thread-safe."""
        item = self._listing.items.get(uid)
        return None if item is None else item.pod

    def manifest(self, uid: str) -> bytes:
        """Return the JSON of a pod in the kubelet's last list; empty without `keep_manifests`, or if it is not listed.
        Thread-safe."""
        item = self._listing.items.get(uid)
        return b"" if item is None else item.manifest

    def workload(self, uid: str) -> str:
        """Return the controller of a pod in the kubelet's last list; empty without one. Thread-safe."""
        pod = self.listed(uid)
        return "" if pod is None else pod.workload

    def request_poll(self) -> None:
        """Poll both as soon as possible. Call it in the event loop's thread."""
        self._poll_requested = True
        self._wake.set()

    def reporters(self) -> tuple[HealthReporter, ...]:
        """Return the health of both, as sources."""
        return (self.kubelet, self.runtime) if self._runtime is not None else (self.kubelet,)

    async def run(self) -> None:
        """Poll every `interval_s`, and at once on an event."""
        listening = asyncio.create_task(self._listen()) if self._config.events else None
        try:
            while True:
                if listening is not None and listening.done():
                    listening.result()  # only a bug ends it; raise it here
                due = self._clock() + self._config.interval_s
                self._wake.clear()
                try:
                    await self.poll()
                except Exception as error:
                    # A bug: show it while it lasts, log it once.
                    text = f"{type(error).__name__}: {error}"
                    if text != self._bug:
                        log.exception("polling the pods failed; the last ones stay in force")
                    self._bug = text
                    self.kubelet.failed(Unavailable(text, "this is a bug: report it with the agent's log"))
                await asyncio.sleep(min(MIN_POLL_GAP_S, self._config.interval_s))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), max(due - self._clock(), 0.0))
        finally:
            if listening is not None:
                listening.cancel()

    async def poll(self) -> None:
        """Poll the runtime, then the kubelet if it may have news, and join the answers."""
        answer = await self._poll_runtime()
        due = self._due(answer)
        if isinstance(answer, RuntimeContainers):
            self._containers = answer
        # While the runtime is unreachable, use its last answer until that is stale.
        runtime_age_s = self.runtime.age_s()
        recent = runtime_age_s is not None and runtime_age_s <= self._config.stale_s
        running = self._containers if isinstance(answer, RuntimeContainers) or recent else None
        body = await self._poll_kubelet() if due else None
        # Decoding a thousand pods takes long: do not block cycles and scrapes.
        listing, joined = await asyncio.to_thread(self._join, body, running)
        if isinstance(listing, KubeletPodList):
            self._listing = listing
        self._joined = joined
        if listing is not None:
            self._report(listing)
        if isinstance(answer, Unavailable):
            self.runtime.failed(answer)
        elif self._runtime is not None:
            self.runtime.answered(self._runtime.events_unavailable)
        if (pods := joined.pods()) != self._pods:
            self._pods = pods

    def _due(self, answer: RuntimeContainers | Unavailable | None) -> bool:
        """Return whether to poll the kubelet, which serializes all its pods for each request. A new pod starts with a
        new sandbox, so there is little news while the same containers run."""
        age_s, poll_requested = self.kubelet.age_s(), self._poll_requested
        self._poll_requested = False
        if (
            poll_requested
            or age_s is None
            or age_s >= MAX_POLLS_WITHOUT_KUBELET * self._config.interval_s
            or self.kubelet.problem() is not None
        ):
            return True
        return (
            not isinstance(answer, RuntimeContainers)
            or answer != self._containers
            or bool(self._unlisted or self._without_cgroup)
        )

    async def _poll_kubelet(self) -> bytes | Unavailable:
        try:
            return await self._kubelet.ask()
        except Unavailable as error:
            return error

    async def _poll_runtime(self) -> RuntimeContainers | Unavailable | None:
        if self._runtime is None:
            return None
        try:
            return await self._runtime.list_running()
        except Unavailable as error:
            return error

    def _join(
        self, body: bytes | Unavailable | None, running: RuntimeContainers | None
    ) -> tuple[KubeletPodList | Unavailable | None, NodePods]:
        """Return the new list, or why it is unusable, or None if none was requested; and the joined pods."""
        previous, problem = self._joined.entries, body
        if isinstance(body, bytes):
            try:
                listing = decode_pod_list(body, self._listing, keep_manifests=self.keep_manifests)
                joined = join_pods(listing, running, previous, self._node)
                if not joined.unlisted_pods or any(item.pod.from_api for item in listing.items.values()):
                    return listing, joined
                problem = _kubelet_not_synced(joined.unlisted_pods)
            except InvalidPodList as error:
                problem = Unavailable(f"{self._kubelet.url}: {error}", "check that kubelet.url is the kubelet's")
        assert not isinstance(problem, bytes)
        return problem, join_pods(self._listing, running, previous, self._node)

    def _report(self, listing: KubeletPodList | Unavailable) -> None:
        """Update the kubelet's health. A mismatch is reported the second time, because the first may be a matter of
        timing."""
        joined = self._joined
        unlisted = sorted(pod for uid, pod in joined.unlisted_pods.items() if uid in self._unlisted)
        without_cgroup = sorted(joined.containers_without_cgroup & self._without_cgroup)
        self._unlisted, self._without_cgroup = joined.unlisted_pods, joined.containers_without_cgroup
        if isinstance(listing, Unavailable):
            self.kubelet.failed(listing)
        elif unreadable := (*listing.problems, *joined.problems):
            self.kubelet.answered(
                Unavailable(
                    f"some pods cannot be read: {join_first(unreadable, _MAX_NAMES_SHOWN)}", "report it with this text"
                )
            )
        elif unlisted:
            remedy = "see the kubelet's log; `crictl pods` shows them, and `crictl rmp` removes them"
            self.kubelet.answered(
                Unavailable(
                    f"the kubelet does not list these running pods: {join_first(unlisted, _MAX_NAMES_SHOWN)}", remedy
                )
            )
        elif without_cgroup:
            remedy = "set kubelet.cgroupRoot to the kubelet's cgroupRoot, and mount the host's cgroups"
            self.kubelet.answered(Unavailable(f"no cgroup of {join_first(without_cgroup, _MAX_NAMES_SHOWN)}", remedy))
        else:
            self.kubelet.answered()

    async def _listen(self) -> None:
        while self._runtime is not None:
            with suppress(Unavailable):
                async for _id in self._runtime.events():
                    self._wake.set()
            # Polling continues whether or not the runtime has events.
            await asyncio.sleep(EVENTS_RETRY_S)


class PodSourceHealth:
    """Health of the kubelet or the runtime."""

    def __init__(self, name: str, form: str, what: str, clock: Callable[[], float]) -> None:
        self.name, self.form, self._what, self._clock = name, form, what, clock
        self._at: float | None = None
        self._error: Unavailable | None = None
        self._unreachable = False

    lost_events: int | None = None

    def answered(self, problem: Unavailable | None = None) -> None:
        """Record an answer, and what is wrong with it."""
        self._at, self._error, self._unreachable = self._clock(), problem, False

    def failed(self, error: Unavailable) -> None:
        """Record a failure; the last answer stays valid."""
        self._error, self._unreachable = error, True

    def age_s(self) -> float | None:
        """Return the age of the last good answer; None without one."""
        return None if self._at is None else self._clock() - self._at

    def problem(self) -> Unavailable | None:
        """Return why the last answer is old and how old it is, or what is wrong with it."""
        age_s = self.age_s()
        if self._error is None or age_s is None or not self._unreachable:
            return self._error
        return Unavailable(f"{self._error.reason} (the {self._what} is {age_s:.0f} s old)", self._error.remedy)


def _kubelet_not_synced(unlisted_pods: Mapping[str, str]) -> Unavailable:
    return Unavailable(
        f"the kubelet lists no pod of the API server, and does not list {len(unlisted_pods)} running pods "
        f"such as {join_first(sorted(unlisted_pods.values()), _MAX_NAMES_SHOWN)}",
        "wait until the restarted kubelet has reached the API server, or see its log",
    )
