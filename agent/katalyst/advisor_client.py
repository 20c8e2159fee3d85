"""Consumes the advice of a stock advisor: polls GetAdvice, or watches the stream of an older advisor.
The latest advice expires 300 s after the last usable answer; the advisor is trusted again after two answers within
120 s.
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
from api.units import NS_PER_S
from common.grpc_unix import GrpcClient, GrpcService, MethodNotOffered

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 5.0
TRUST_TIMEOUT_S = 300.0
"""Time without a usable answer after which an advisor is not trusted."""
RECOVERY_WINDOW_S = 120.0
"""Time within which two usable answers restore the trust."""
AdviceT = TypeVar("AdviceT")


class AdvisorHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Times of usable answers in ns of CLOCK_MONOTONIC."""

    since_ns: int
    """Time of the first request."""
    last_ns: int | None = None
    """Time of the last usable answer."""
    lost: bool = False
    """Whether the advisor was silent for too long before that answer."""

    def after_answer(self, now_ns: int) -> AdvisorHealth:
        """Return the health after a usable answer."""
        before = self.since_ns if self.last_ns is None else self.last_ns
        silent = now_ns - before > TRUST_TIMEOUT_S * NS_PER_S
        steady = self.last_ns is not None and now_ns - self.last_ns <= RECOVERY_WINDOW_S * NS_PER_S
        return msgspec.structs.replace(self, last_ns=now_ns, lost=silent or (self.lost and not steady))

    def trusted(self, now_ns: int) -> bool:
        """Return whether the latest advice is valid."""
        return self.last_ns is not None and not self.lost and now_ns - self.last_ns <= TRUST_TIMEOUT_S * NS_PER_S


class AdvisorClient(Generic[AdviceT]):
    """Client of one advisor; `service` is the descriptor of CPUAdvisor or AdvisorService.

    `encode` returns the request, or None while there is nothing to request; `decode` converts the answer and raises
    UnusableMessage.
    """

    def __init__(
        self,
        path: Path,
        service: Any,
        encode: Callable[[], Any],
        decode: Callable[[Any], AdviceT],
        now_ns: Callable[[], int] = time.monotonic_ns,
        trusted_uids: tuple[int, ...] = (),
    ) -> None:
        self._path, self._service, self._encode, self._decode, self._now_ns = path, service, encode, decode, now_ns
        self._trusted_uids = trusted_uids
        self._latest: AdviceT | None = None
        self._added: frozenset[tuple[str, str]] = frozenset()
        self.health = AdvisorHealth(since_ns=now_ns())
        self.problem: Unavailable | None = None
        """Why the last answer is missing or was rejected; None after a usable answer."""

    def advice(self) -> AdviceT | None:
        """Return the latest advice while it is valid."""
        return self._latest if self.health.trusted(self._now_ns()) else None

    async def run(self, every_s: float = POLL_INTERVAL_S) -> None:
        """Poll until cancelled."""
        client = GrpcClient(self._path, self._service, metadata=SUPPORTS_GET_ADVICE, trusted_uids=self._trusted_uids)
        try:
            while True:
                await self._poll(client, every_s)
                await asyncio.sleep(every_s)
        finally:
            await client.close()

    async def _poll(self, client: GrpcClient, every_s: float) -> None:
        request = self._encode()
        if request is None:
            return
        try:
            self._accept(await client.call("GetAdvice", request))
        except MethodNotOffered:
            await self._watch(every_s)
        except Unavailable as error:
            self._failed(error)

    async def _watch(self, every_s: float) -> None:
        """Use the older protocol: report containers and read the stream until it ends or is silent for too long."""
        log.info("%s does not offer GetAdvice; using ListAndWatch", self._path)
        client = GrpcClient(self._path, self._service, trusted_uids=self._trusted_uids)
        self._added = frozenset()
        stream = client.stream("ListAndWatch", svc.Empty())
        try:
            while True:
                await self._report_containers(client)
                self._accept(await asyncio.wait_for(anext(stream), max(every_s * 12, 1.0)))
        except (TimeoutError, StopAsyncIteration):
            self._failed(Unavailable(f"{self._path}: the stream of advice ended", "see the log of the advisor"))
        except Unavailable as error:
            self._failed(error)
        finally:
            await stream.aclose()
            await client.close()

    async def _report_containers(self, client: GrpcClient) -> None:
        """Add new containers and remove pods that are gone since the last report."""
        request = self._encode()
        containers: Mapping[tuple[str, str], Any] = {} if request is None else _container_metadata(request)
        for key in sorted(containers.keys() - self._added):
            await client.call("AddContainer", containers[key])
        for uid in sorted({uid for uid, _name in self._added} - {uid for uid, _name in containers}):
            await client.call("RemovePod", svc.RemovePodRequest(pod_uid=uid))
        self._added = frozenset(containers)

    def _accept(self, answer: Any) -> None:
        try:
            self._latest = self._decode(answer)
        except UnusableMessage as error:
            remedy = "check the version of the advisor; until then its previous advice is used"
            self._failed(Unavailable(f"{self._path}: {error}", remedy))
            return
        self.health = self.health.after_answer(self._now_ns())
        self.problem = None

    def _failed(self, error: Unavailable) -> None:
        if self.problem is None or self.problem.reason != error.reason:
            log.warning("%s; %s", error.reason, error.remedy)
        self.problem = error


def _container_metadata(request: Any) -> dict[tuple[str, str], Any]:
    """Return metadata by pod uid and container of either protocol's request, without pools."""
    return {
        (uid, name): item if isinstance(item, svc.ContainerMetadata) else item.metadata
        for uid, pod in request.entries.items()
        for name, item in pod.entries.items()
        if name
    }


def qrm_plugin_services(
    checkpoint: Callable[[], Any], containers: Callable[[], Any]
) -> tuple[GrpcService, GrpcService]:
    """Return the services that advisors call at `cpu_plugin.sock` and `memory_plugin.sock`. `checkpoint` returns a
    GetCheckpointResponse; `containers` returns a GetAdviceRequest of memory whose containers are listed."""

    async def get(_request: Any, _metadata: Mapping[str, str]) -> Any:
        return checkpoint()

    async def listed(_request: Any, _metadata: Mapping[str, str]) -> Any:
        return svc.ListContainersResponse(containers=_container_metadata(containers()).values())

    return (
        GrpcService(cpu.DESCRIPTOR.services_by_name["CPUPlugin"], {"GetCheckpoint": get}),
        GrpcService(svc.DESCRIPTOR.services_by_name["QRMService"], {"ListContainers": listed}),
    )
