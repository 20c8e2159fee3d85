"""Pods as the scheduler needs them: the fields of the API object that it decodes, and the amounts computed from them.
Pure. Only these fields are decoded, because 150,000 pods with all their labels and environments would take gigabytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec

from api.annotations import MAX_ANNOTATION_CHARS
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.qos import MAIN_CONTAINER_KEY, MEMORY_KEY, QOS_LEVEL_KEY, QoSLevel, explicit_qos_level
from api.quantity import convert_quantity
from controller.scheduler.pod_alignment import ContainerShape, PodAlignment, parse_pod_alignment
from kube.objects import Toleration

CPU, MEMORY = "cpu", "memory"
DEFAULT_MILLICPU, DEFAULT_MEMORY_BYTES = 100, 200 << 20
"""Amounts that scoring assumes for a container that requests nothing, so that such pods spread (kube-scheduler,
pkg/scheduler/util/pod_resources.go; Katalyst, pkg/scheduler/util/extend.go)."""
GANG_NAME_KEY, GANG_MIN_KEY = (
    "gang.scheduling.koordinator.sh/name",
    "gang.scheduling.koordinator.sh/min-available",
)
MAX_AMOUNT = (1 << 47) - 1
"""Largest amount: 128 TiB, or 140 billion cores; larger ones count as this. The API server stores up to 2^63 - 1 for each
container. The sum of two such amounts would overflow the arrays of the nodes, and count as free resources. With this limit the
sum of 65,536 pods on one node does not overflow."""
MAX_NAME_CHARS = 253
"""Characters of the name of a gang, as of any object."""
MAX_CONTAINERS = 1024
"""Containers of a pod that is placed. A pod of 1.5 MiB can have 30,000, which take 0.4 s at each attempt."""
FINISHED_PHASES = frozenset(("Succeeded", "Failed"))


class _PodStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, gc=False):
    pass


class PodAnnotations(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Annotations that the scheduler reads; all others are dropped while decoding."""

    qos_level: str = msgspec.field(default="", name=QOS_LEVEL_KEY)
    gang_name: str = msgspec.field(default="", name=GANG_NAME_KEY)
    gang_min: str = msgspec.field(default="", name=GANG_MIN_KEY)
    memory_enhancement: str = msgspec.field(default="", name=MEMORY_KEY)
    main_container: str = msgspec.field(default="", name=MAIN_CONTAINER_KEY)

    def __post_init__(self) -> None:
        # A pod may have 256 KiB of annotations, which would stay in the memory of every extender while the pod exists.
        for name in ("qos_level", "gang_name", "gang_min", "main_container"):
            self._cut(name, MAX_NAME_CHARS)
        self._cut("memory_enhancement", MAX_ANNOTATION_CHARS)

    def _cut(self, name: str, max_chars: int) -> None:
        # One character more than is valid, so that a text that was cut is reported as too long.
        if len(text := getattr(self, name)) > max_chars + 1:
            msgspec.structs.force_setattr(self, name, text[: max_chars + 1])


class ScheduledPodMetadata(_PodStruct, frozen=True, kw_only=True, gc=False):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    annotations: PodAnnotations = PodAnnotations()


class ResourceAmounts(_PodStruct, frozen=True, kw_only=True, gc=False):
    """The requests or limits that the scheduler counts, as the API writes quantities."""

    cpu: str | int | float | None = None
    memory: str | int | float | None = None
    reclaimed_cpu: str | int | float | None = msgspec.field(default=None, name=RECLAIMED_CPU)
    reclaimed_memory: str | int | float | None = msgspec.field(default=None, name=RECLAIMED_MEMORY)


class ContainerResources(_PodStruct, frozen=True, kw_only=True, gc=False):
    requests: ResourceAmounts = ResourceAmounts()
    limits: ResourceAmounts = ResourceAmounts()


class ScheduledContainer(_PodStruct, frozen=True, kw_only=True, gc=False):
    name: str = ""
    resources: ContainerResources = ContainerResources()
    restart_policy: str = ""
    """`Always` makes an init container a sidecar (KEP-753)."""


class SchedulingGate(_PodStruct, frozen=True, kw_only=True, gc=False):
    """Gate of a pod: kube-scheduler tries a pod only after all its gates are removed (KEP-3521)."""

    name: str = ""


class ScheduledPodSpec(_PodStruct, frozen=True, kw_only=True, gc=False):
    node_name: str = ""
    scheduler_name: str = ""
    priority: int | None = None
    containers: tuple[ScheduledContainer, ...] = ()
    init_containers: tuple[ScheduledContainer, ...] | None = None
    overhead: ResourceAmounts = ResourceAmounts()
    tolerations: tuple[Toleration, ...] | None = None
    scheduling_gates: tuple[SchedulingGate, ...] | None = None


class PodPhase(_PodStruct, frozen=True, kw_only=True, gc=False):
    phase: str = ""


class ScheduledPod(_PodStruct, frozen=True, kw_only=True, gc=False):
    """Pod of the API server, with the fields that decide where it may run and what it takes there."""

    metadata: ScheduledPodMetadata = ScheduledPodMetadata()
    spec: ScheduledPodSpec = ScheduledPodSpec()
    status: PodPhase = PodPhase()

    @property
    def holds_resources(self) -> bool:
        """Whether the pod uses resources of a node: it has a node, and its containers have not ended for good."""
        return bool(self.spec.node_name) and not self.has_ended

    @property
    def has_ended(self) -> bool:
        return self.status.phase in FINISHED_PHASES


class Amounts(NamedTuple):
    """CPU in thousandths and memory in bytes."""

    millicpu: int = 0
    memory: int = 0


class SchedulingPod(NamedTuple):
    """The properties of a pod that plugins evaluate."""

    key: str
    uid: str
    level: QoSLevel
    reclaimed: Amounts
    """Requests of Katalyst's reclaimed resources."""
    reclaimed_nonzero: Amounts
    """The same for scoring, with DEFAULT_MILLICPU and DEFAULT_MEMORY_BYTES for containers that request nothing."""
    native: Amounts
    """Requests of cpu and memory."""
    load_basis: Amounts
    """Amounts from which the load of the pod is estimated: the larger of requests and limits, native or reclaimed."""
    tolerations: tuple[Toleration, ...] = ()
    priority: int = 0
    alignment: PodAlignment | None = None
    """What a kubelet may pin for it or align; None for pods without pinned CPUs that are not dedicated_cores."""

    @property
    def is_reclaimed(self) -> bool:
        return self.level is QoSLevel.RECLAIMED


def parse_pending_pod(pod: ScheduledPod) -> SchedulingPod:
    """Compute the amounts of a pod that is to be placed.

    Raises ValueError that names the field and the fix, also for more than MAX_CONTAINERS.
    """
    count = len(pod.spec.containers) + len(pod.spec.init_containers or ())
    if count > MAX_CONTAINERS:
        raise ValueError(f"spec.containers: {count} containers are more than {MAX_CONTAINERS}; write several pods")
    return parse_scheduling_pod(pod)


def parse_scheduling_pod(pod: ScheduledPod) -> SchedulingPod:
    """Compute the amounts of a pod. Raises ValueError that names the field and the fix."""
    level, spec = qos_level(pod), pod.spec
    requests = [_ContainerAmounts.of(container) for container in spec.containers]
    inits = [(_ContainerAmounts.of(each), each.restart_policy == "Always") for each in spec.init_containers or ()]
    reclaimed = level is QoSLevel.RECLAIMED
    native = _total(
        (each.native for each in requests),
        [(each.native, sidecar) for each, sidecar in inits],
        Amounts(
            _milli_or_units("overhead", CPU, spec.overhead.cpu, 1000),
            _milli_or_units("overhead", MEMORY, spec.overhead.memory, 1),
        ),
    )
    shapes = (
        *(
            ContainerShape(each.name, amounts.native, amounts.native_limits)
            for each, amounts in zip(spec.containers, requests, strict=True)
        ),
        *(
            ContainerShape("", amounts.native, amounts.native_limits, init=True, sidecar=sidecar)
            for amounts, sidecar in inits
        ),
    )
    annotations = pod.metadata.annotations
    return SchedulingPod(
        key=f"{pod.metadata.namespace}/{pod.metadata.name}",
        uid=pod.metadata.uid,
        level=level,
        reclaimed=_total(
            (each.reclaimed for each in requests),
            [(each.reclaimed, sidecar) for each, sidecar in inits],
            Amounts(
                _milli_or_units("overhead", RECLAIMED_CPU, spec.overhead.reclaimed_cpu, 1),
                _milli_or_units("overhead", RECLAIMED_MEMORY, spec.overhead.reclaimed_memory, 1),
            ),
        ),
        reclaimed_nonzero=_total(
            (_with_defaults(each.reclaimed) for each in requests),
            [(_with_defaults(each.reclaimed), sidecar) for each, sidecar in inits],
            Amounts(),
        ) if reclaimed else Amounts(),
        native=native,
        load_basis=_sum(each.load_basis(reclaimed=reclaimed) for each in requests),
        tolerations=spec.tolerations or (),
        priority=spec.priority or 0,
        alignment=parse_pod_alignment(
            level, annotations.memory_enhancement, annotations.main_container, shapes, native
        ),
    )  # fmt: skip


def qos_level(pod: ScheduledPod) -> QoSLevel:
    """Return the level of a pod; a pod without one is shared_cores, as in Katalyst. Raises ValueError for an unknown one."""
    return _parse_level(pod.metadata.annotations.qos_level)


@lru_cache(maxsize=64)
def _parse_level(text: str) -> QoSLevel:
    return (explicit_qos_level({QOS_LEVEL_KEY: text}) if text else None) or QoSLevel.SHARED


class _ContainerAmounts(NamedTuple):
    native: Amounts
    reclaimed: Amounts
    native_limits: Amounts

    @classmethod
    def of(cls, container: ScheduledContainer) -> _ContainerAmounts:
        requests, limits = container.resources.requests, container.resources.limits
        where = f"container {container.name[:63]}"
        return cls(
            Amounts(
                _milli_or_units(where, CPU, requests.cpu, 1000), _milli_or_units(where, MEMORY, requests.memory, 1)
            ),
            Amounts(
                _milli_or_units(where, RECLAIMED_CPU, requests.reclaimed_cpu, 1),
                _milli_or_units(where, RECLAIMED_MEMORY, requests.reclaimed_memory, 1),
            ),
            Amounts(_milli_or_units(where, CPU, limits.cpu, 1000), _milli_or_units(where, MEMORY, limits.memory, 1)),
        )

    def load_basis(self, *, reclaimed: bool) -> Amounts:
        # Limits of extended resources equal their requests (API validation), so reclaimed pods have no second number.
        return self.reclaimed if reclaimed else _max(self.native, self.native_limits)


def _with_defaults(amounts: Amounts) -> Amounts:
    return Amounts(amounts.millicpu or DEFAULT_MILLICPU, amounts.memory or DEFAULT_MEMORY_BYTES)


def _total(containers: Iterable[Amounts], inits: Iterable[tuple[Amounts, bool]], overhead: Amounts) -> Amounts:
    """Return the request of a pod: the maximum over its phases, as k8s.io/component-helpers/resource PodRequests computes it.

    Init containers run one after another, each together with the sidecars that started before it; all sidecars continue.
    """
    sidecars, largest_init = Amounts(), Amounts()
    for amounts, is_sidecar in inits:
        running = _sum((sidecars, amounts))
        largest_init = _max(largest_init, running)
        if is_sidecar:
            sidecars = running
    return _sum((_max(_sum((*containers, sidecars)), largest_init), overhead))


def _sum(amounts: Iterable[Amounts]) -> Amounts:
    listed = list(amounts)
    return Amounts(
        min(sum(each.millicpu for each in listed), MAX_AMOUNT), min(sum(each.memory for each in listed), MAX_AMOUNT)
    )


def _max(first: Amounts, second: Amounts) -> Amounts:
    return Amounts(max(first.millicpu, second.millicpu), max(first.memory, second.memory))


def _milli_or_units(where: str, name: str, value: str | float | None, scale: int) -> int:
    if value is None:
        return 0
    try:
        return min(quantity_units(value, scale), MAX_AMOUNT)
    except ValueError as error:
        raise ValueError(f"{where}: {name}: {error}") from None


@lru_cache(maxsize=16_384)
def quantity_units(value: str | float, scale: int = 1) -> int:
    """Return a quantity in units, or in thousandths with scale 1000, rounded up as Quantity.Value() and MilliValue() do.

    Raises ValueError that quotes the value. Cached, because a cluster's pods share few amounts and decimals are slow.
    """
    return math.ceil(convert_quantity(value) * scale)


def amounts_of(quantities: Mapping[str, str | int | float], cpu: str, memory: str, cpu_scale: int) -> Amounts:
    """Return CPU and memory of a resource list by their names, at most MAX_AMOUNT; 0 for a missing one.

    Raises ValueError as quantity_units.
    """
    return Amounts(
        min(quantity_units(quantities[cpu], cpu_scale), MAX_AMOUNT) if cpu in quantities else 0,
        min(quantity_units(quantities[memory]), MAX_AMOUNT) if memory in quantities else 0,
    )
