"""Takes advice from a stock advisor: polls GetAdvice, or watches the stream of an older advisor.
The latest advice is valid until no usable answer has come for 300 s; after that the advisor is trusted again once
two answers come within 120 s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from agent.katalyst.messages import SUPPORTS_GET_ADVICE, UnusableMessage
from api.interfaces import Unavailable
from api.proto import advisor_svc_pb2 as svc
from api.proto import cpu_advisor_pb2 as cpu
from common.grpc_unix import GrpcClient, GrpcService, MethodNotOffered

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 5.0
TRUST_TIMEOUT_S = 300.0
"""Without a usable answer for so long, an advisor is not trusted."""
RECOVERY_WINDOW_S = 120.0
"""Within so long two of them make it trusted again."""
NS_PER_S = 1_000_000_000
Taken = TypeVar("Taken")


class AdvisorHealth(msgspec.Struct, frozen=True, kw_only=True):
    """When something usable came. Times are ns of CLOCK_MONOTONIC."""

    since_ns: int
    """When it was asked first,"""
    last_ns: int | None = None
    """when it answered last,"""
    lost: bool = False
    """and whether it was silent for too long before that."""

    def heard(self, now_ns: int) -> AdvisorHealth:
        """The same after a usable answer."""
        before = self.since_ns if self.last_ns is None else self.last_ns
        silent = now_ns - before > TRUST_TIMEOUT_S * NS_PER_S
        steady = self.last_ns is not None and now_ns - self.last_ns <= RECOVERY_WINDOW_S * NS_PER_S
        return msgspec.structs.replace(self, last_ns=now_ns, lost=silent or (self.lost and not steady))

    def trusted(self, now_ns: int) -> bool:
        """Whether what it said last stands."""
        return self.last_ns is not None and not self.lost and now_ns - self.last_ns <= TRUST_TIMEOUT_S * NS_PER_S


class AdvisorClient(Generic[Taken]):
    """One advisor; `service` is the descriptor of CPUAdvisor or AdvisorService.
    `ask` makes the question, None while there is nothing to ask; `take` makes of the answer what it says, and raises
    Unusable.
    """

    def __init__(
        self,
        path: Path,
        service: Any,
        ask: Callable[[], Any],
        take: Callable[[Any], Taken],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._path, self._service, self._ask, self._take, self._now_ns = path, service, ask, take, now_ns
        self._latest: Taken | None = None
        self._told: frozenset[tuple[str, str]] = frozenset()
        self.health = AdvisorHealth(since_ns=now_ns())
        self.problem: Unavailable | None = None
        """Why the last answer could not be used, or did not come; None where it could."""

    def advice(self) -> Taken | None:
        """What it said last, as long as that stands."""
        return self._latest if self.health.trusted(self._now_ns()) else None

    async def run(self, every_s: float = POLL_INTERVAL_S) -> None:
        """Ask until cancelled."""
        peer = GrpcClient(self._path, self._service, metadata=SUPPORTS_GET_ADVICE)
        try:
            while True:
                await self._turn(peer, every_s)
                await asyncio.sleep(every_s)
        finally:
            await peer.close()

    async def _turn(self, peer: GrpcClient, every_s: float) -> None:
        request = self._ask()
        if request is None:
            return
        try:
            self._use(await peer.call("GetAdvice", request))
        except MethodNotOffered:
            await self._listen(every_s)
        except Unavailable as error:
            self._failed(error)

    async def _listen(self, every_s: float) -> None:
        """The older way: tell it who is there, and take what it says, until it stops or is silent for too long."""
        log.info("%s takes no questions; it is listened to", self._path)
        peer, self._told = GrpcClient(self._path, self._service), frozenset()
        stream = peer.stream("ListAndWatch", svc.Empty())
        try:
            while True:
                await self._tell(peer)
                self._use(await asyncio.wait_for(anext(stream), max(every_s * 12, 1.0)))
        except (TimeoutError, StopAsyncIteration):
            self._failed(Unavailable(f"{self._path}: its stream of advice stopped", "see its log; it is asked again"))
        except Unavailable as error:
            self._failed(error)
        finally:
            await stream.aclose()
            await peer.close()

    async def _tell(self, peer: GrpcClient) -> None:
        """Who is there, and who is not any more, since it was told last."""
        request = self._ask()
        containers: Mapping[tuple[str, str], Any] = {} if request is None else _container_metadata(request)
        for key in sorted(containers.keys() - self._told):
            await peer.call("AddContainer", containers[key])
        for uid in sorted({uid for uid, _name in self._told} - {uid for uid, _name in containers}):
            await peer.call("RemovePod", svc.RemovePodRequest(pod_uid=uid))
        self._told = frozenset(containers)

    def _use(self, answer: Any) -> None:
        try:
            self._latest = self._take(answer)
        except UnusableMessage as error:
            self._failed(Unavailable(f"{self._path}: {error}", "what it said before stands; see which advisor that is"))
            return
        self.health = self.health.heard(self._now_ns())
        self.problem = None

    def _failed(self, error: Unavailable) -> None:
        if self.problem is None or self.problem.reason != error.reason:
            log.warning("%s; %s", error.reason, error.remedy)
        self.problem = error


def _container_metadata(request: Any) -> dict[tuple[str, str], Any]:
    """Metadata by uid and container, of either protocol's question; pools are none."""
    found = {}
    for uid, its in request.entries.items():
        for name, item in its.entries.items():
            if name:
                found[uid, name] = item if isinstance(item, svc.ContainerMetadata) else item.metadata
    return found


def qrm_plugin_services(
    checkpoint: Callable[[], Any], containers: Callable[[], Any]
) -> tuple[GrpcService, GrpcService]:
    """What advisors ask a plugin, for `cpu_plugin.sock` and `memory_plugin.sock`: GetCheckpointResponse of who has which CPUs,
    and memory's question (GetAdviceRequest), whose containers are listed."""

    async def get(_request: Any, _words: Mapping[str, str]) -> Any:
        return checkpoint()

    async def listed(_request: Any, _words: Mapping[str, str]) -> Any:
        return svc.ListContainersResponse(containers=_container_metadata(containers()).values())

    return (
        GrpcService(cpu.DESCRIPTOR.services_by_name["CPUPlugin"], {"GetCheckpoint": get}),
        GrpcService(svc.DESCRIPTOR.services_by_name["QRMService"], {"ListContainers": listed}),
    )
