"""Provides the node's pods from the kubelet and the container runtime, polled in the background.
A cycle never waits for either: it reads the latest answer. While the kubelet is unreachable its last list stays in
force; once that list is older than `staleS`, `read` raises Unavailable.
"""

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
from api.interfaces import Probe, ProbeReading, Unavailable
from api.pod import Pod

if TYPE_CHECKING:
    from agent.sensors.pods.cri_client import ContainerRuntimeClient

log = logging.getLogger(__name__)
MIN_POLL_GAP_S = 0.25
"""Between two looks at least, however many events there are."""
EVENTS_RETRY_S = 10.0
_MAX_NAMES_SHOWN = 3


class KubeletPodSource:
    """A PodSource (api.interfaces). `turn` looks once; `run` goes on doing so until it is cancelled."""

    def __init__(
        self,
        kubelet: KubeletClient,
        runtime: ContainerRuntimeClient | None,
        node: PodJoinContext,
        config: KubeletConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kubelet, self._runtime, self._node, self._config, self._clock = kubelet, runtime, node, config, clock
        self.kubelet = PodSourceHealth("kubelet", config.url.partition(":")[0], "list of pods", clock)
        self.runtime = PodSourceHealth(
            "container-runtime", str(runtime.socket) if runtime else "none", "list of containers", clock
        )
        self._listing, self._looked, self._joined = KubeletPodList(), RuntimeContainers(), NodePods()
        self._pods: tuple[Pod, ...] = ()
        self._unlisted: Mapping[str, str] = {}
        self._homeless: frozenset[str] = frozenset()
        self._wake = asyncio.Event()
        self._nudged = False
        self._bug = ""

    def read(self) -> tuple[Pod, ...]:
        """The pods as of the last answer; the same tuple until something changes. Raises Unavailable before the first list, and
        when the last is too old."""
        age_s = self.kubelet.age_s()
        if age_s is not None and age_s <= self._config.stale_s:
            return self._pods
        old = "the kubelet was not asked yet" if age_s is None else f"the list of pods is {age_s:.0f} s old"
        raise self.kubelet.problem() or Unavailable(old, "wait a second, and see the agent's log")

    def listed(self, uid: str) -> KubeletPod | None:
        """What the kubelet said last of that pod. Any thread may ask."""
        item = self._listing.items.get(uid)
        return None if item is None else item.pod

    def nudge(self) -> None:
        """Ask both as soon as may be: somebody knows that there is news. For the thread of the event loop."""
        self._nudged = True
        self._wake.set()

    def probes(self) -> tuple[Probe, ...]:
        """How both fare, as sources of their own."""
        return (self.kubelet, self.runtime) if self._runtime is not None else (self.kubelet,)

    async def run(self) -> None:
        """Look every `interval_s`, and at once on an event."""
        listening = asyncio.create_task(self._listen()) if self._config.events else None
        try:
            while True:
                if listening is not None and listening.done():
                    listening.result()  # it ends by a bug alone, which ends this too
                due = self._clock() + self._config.interval_s
                self._wake.clear()
                try:
                    await self.run_cycle()
                except Exception as error:
                    # A bug: shown as long as it lasts, and logged when it is new.
                    text = f"{type(error).__name__}: {error}"
                    if text != self._bug:
                        log.exception("a look at the pods failed; the last ones stay in force")
                    self._bug = text
                    self.kubelet.failed(Unavailable(text, "this is a bug: report it with the agent's log"))
                await asyncio.sleep(min(MIN_POLL_GAP_S, self._config.interval_s))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), max(due - self._clock(), 0.0))
        finally:
            if listening is not None:
                listening.cancel()

    async def run_cycle(self) -> None:
        """Ask the runtime, then the kubelet if it may have something new to say, and take what they say."""
        looked = await self._ask_runtime()
        due = self._due(looked)
        if isinstance(looked, RuntimeContainers):
            self._looked = looked
        # While the runtime is away, what ran last; once that is too old, nothing is known from it.
        away_s = self.runtime.age_s()
        recent = away_s is not None and away_s <= self._config.stale_s
        runs = self._looked if isinstance(looked, RuntimeContainers) or recent else None
        body = await self._ask_kubelet() if due else None
        # Decoding a thousand pods takes a while, in which rounds and scrapes go on.
        listing, joined = await asyncio.to_thread(self._understood, body, runs)
        if isinstance(listing, KubeletPodList):
            self._listing = listing
        self._joined = joined
        if listing is not None:
            self._tell(listing)
        if isinstance(looked, Unavailable):
            self.runtime.failed(looked)
        elif self._runtime is not None:
            self.runtime.answered(self._runtime.events_unavailable)
        if (pods := joined.pods()) != self._pods:
            self._pods = pods

    def _due(self, looked: RuntimeContainers | Unavailable | None) -> bool:
        """Whether to ask the kubelet, for which it writes out all its pods: a new pod is a new sandbox first, so that there
        is little to learn while the same containers run."""
        age_s, nudged = self.kubelet.age_s(), self._nudged
        self._nudged = False
        if (
            nudged
            or age_s is None
            or age_s >= MAX_POLLS_WITHOUT_KUBELET * self._config.interval_s
            or self.kubelet.problem() is not None
        ):
            return True
        return (
            not isinstance(looked, RuntimeContainers)
            or looked != self._looked
            or bool(self._unlisted or self._homeless)
        )

    async def _ask_kubelet(self) -> bytes | Unavailable:
        try:
            return await self._kubelet.ask()
        except Unavailable as error:
            return error

    async def _ask_runtime(self) -> RuntimeContainers | Unavailable | None:
        if self._runtime is None:
            return None
        try:
            return await self._runtime.look()
        except Unavailable as error:
            return error

    def _understood(
        self, body: bytes | Unavailable | None, runs: RuntimeContainers | None
    ) -> tuple[KubeletPodList | Unavailable | None, NodePods]:
        """The new listing, or why it cannot be believed, None where none was asked for; and what that or the last one makes
        together with what runs."""
        before, failed = self._joined.entries, body
        if isinstance(body, bytes):
            try:
                listing = decode_pod_list(body, self._listing)
                joined = join_pods(listing, runs, before, self._node)
                if not joined.unlisted_pods or any(item.pod.from_api for item in listing.items.values()):
                    return listing, joined
                failed = _kubelet_not_synced(joined.unlisted_pods)
            except InvalidPodList as error:
                failed = Unavailable(f"{self._kubelet.url}: {error}", "see whether kubelet.url is the kubelet's")
        assert not isinstance(failed, bytes)
        return failed, join_pods(self._listing, runs, before, self._node)

    def _tell(self, listing: KubeletPodList | Unavailable) -> None:
        """How the kubelet fared. What does not fit is told at the second time: then it is no matter of who was asked first."""
        joined = self._joined
        still = sorted(pod for uid, pod in joined.unlisted_pods.items() if uid in self._unlisted)
        lost = sorted(joined.containers_without_cgroup & self._homeless)
        self._unlisted, self._homeless = joined.unlisted_pods, joined.containers_without_cgroup
        if isinstance(listing, Unavailable):
            self.kubelet.failed(listing)
        elif unread := (*listing.problems, *joined.problems):
            self.kubelet.answered(
                Unavailable(f"some pods cannot be read: {_names_text(unread)}", "report it with this text")
            )
        elif still:
            remedy = "see the kubelet's log; `crictl pods` shows them, and `crictl rmp` removes them"
            self.kubelet.answered(Unavailable(f"pods run that the kubelet does not list: {_names_text(still)}", remedy))
        elif lost:
            remedy = "write in kubelet.cgroupRoot the kubelet's cgroupRoot, and have the agent see the host's cgroups"
            self.kubelet.answered(Unavailable(f"no cgroup was found of {_names_text(lost)}", remedy))
        else:
            self.kubelet.answered()

    async def _listen(self) -> None:
        while self._runtime is not None:
            with suppress(Unavailable):
                async for _id in self._runtime.events():
                    self._wake.set()
            # Whether or not it can tell, it is asked in time all the same.
            await asyncio.sleep(EVENTS_RETRY_S)


class PodSourceHealth:
    """How one of them fares: a Probe that counts nothing."""

    def __init__(self, name: str, form: str, what: str, clock: Callable[[], float]) -> None:
        self.name, self.form, self._what, self._clock = name, form, what, clock
        self._at: float | None = None
        self._error: Unavailable | None = None
        self._away = False

    lost_events: int | None = None

    def answered(self, ails: Unavailable | None = None) -> None:
        """It did, and what is wrong with what it said."""
        self._at, self._error, self._away = self._clock(), ails, False

    def failed(self, error: Unavailable) -> None:
        """It did not; what it said last counts."""
        self._error, self._away = error, True

    def age_s(self) -> float | None:
        """Of the last good answer; None where there was none."""
        return None if self._at is None else self._clock() - self._at

    def problem(self) -> Unavailable | None:
        """Why the last answer is old, and how old it is; or what is wrong with it."""
        age_s = self.age_s()
        if self._error is None or age_s is None or not self._away:
            return self._error
        return Unavailable(f"{self._error.reason} (the {self._what} is {age_s:.0f} s old)", self._error.remedy)

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - a Probe's
        return ProbeReading()

    def close(self) -> None:
        pass


def _kubelet_not_synced(unlisted_pods: Mapping[str, str]) -> Unavailable:
    return Unavailable(
        f"the kubelet lists no pod of the API server, and {len(unlisted_pods)} run that it does not list, "
        f"such as {_names_text(sorted(unlisted_pods.values()))}",
        "it was just started: wait until it has reached the API server, or see its log",
    )


def _names_text(names: tuple[str, ...] | list[str]) -> str:
    more = [f"and {len(names) - _MAX_NAMES_SHOWN} more"] if len(names) > _MAX_NAMES_SHOWN else []
    return ", ".join([*names[:_MAX_NAMES_SHOWN], *more])
