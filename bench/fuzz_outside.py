"""Feeds hostile annotations, labels, names, quantities and answers to the parsers of text from outside, and measures what
each costs: CPU time of the thread, and memory by tracemalloc. Both are compared with the size of the input, because a
parser whose cost grows faster than its input lets one pod stop the agent.
"""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from agent.nri.signed_annotation import SignedAnnotations
from agent.sensors.pods.cri_client import container_cgroup, join_runtime_lists
from agent.sensors.pods.pod_indicators import InvalidIndicator, parse_histogram
from agent.sensors.pods.pod_join import InvalidPodList, KubeletPodList, PodJoinContext, decode_pod_list, join_pods
from agent.sensors.pods.pod_spec import PodParsingContext
from api.annotations import PROFILE_KEY
from api.proto import cri_runtime_pb2 as cri
from api.qos import (
    CPU_KEY,
    MAIN_CONTAINER_KEY,
    MEMORY_KEY,
    NETWORK_KEY,
    NUMA_BIND_RESULT_KEY,
    NUMA_IDS_KEY,
    NUMA_NUMBER_KEY,
    QOS_LEVEL_KEY,
)

MAX_INPUT_CHARS = 256 << 10
"""Largest input: what Kubernetes allows in all annotations of a pod."""
REFERENCE_LIMIT, MAX_EXTRA_NS = 40, 20_000_000
"""A parser may take 40 times as long as reading each character of its input once in Python, and 20 ms more."""
MEMORY_LIMIT, MAX_EXTRA_BYTES = 32, 2 << 20
"""A parser may use 32 bytes for each byte of its input, and 2 MiB more. A dictionary of short texts takes 25."""
KEYS = (
    QOS_LEVEL_KEY, CPU_KEY, MEMORY_KEY, NETWORK_KEY, NUMA_IDS_KEY, NUMA_NUMBER_KEY, NUMA_BIND_RESULT_KEY, MAIN_CONTAINER_KEY,
    PROFILE_KEY, "oom_priority", "cpuset_pool", "koordinator.sh/cpuBurst", "koordinator.sh/memoryQOS",
    "scheduling.koordinator.sh/resource-spec", "scheduling.koordinator.sh/resource-status",
    "scheduling.koordinator.sh/numa-topology-spec", "node.koordinator.sh/extended-resource-spec", "other.example/key",
)  # fmt: skip
PIECES = (
    "0-8191,", "8191-0,", "1,", "9", "1e999999", "1e-99", "0.1", "[", '{"a":', '{"a":1},', '"', "\\", "-", "a-", "a.", "/",
    "\x1b[31m\n", "\n", "\u202e", "\u0663", "\ud800", "\x00", " ", "true", "null", "Ki", "h1m", "koordinator.sh/", "pod",
)  # fmt: skip
FIELDS = (
    "numa_binding", "numa_exclusive", "oom_priority", "cpuset_pool", "burst_percent", "targets", "disableReclaimLevel",
    "memoryOffloading", "policy", "cpuBurstPercent", "requiredCPUBindPolicy", "numaNodeResources", "cpuset", "containers",
)  # fmt: skip


class OutsideCase(NamedTuple):
    """A parser with its inputs."""

    name: str
    make: Callable[[random.Random, int], Any]
    """Return an input of about so many characters."""
    parse: Callable[[Any], Any]


class ParsingCost(NamedTuple):
    """What one input cost."""

    name: str
    size: int
    cpu_ns: int
    allowed_ns: int
    peak_bytes: int
    allowed_bytes: int

    def problem(self) -> str:
        """Describe what exceeds its limit; empty if nothing does."""
        if self.cpu_ns > self.allowed_ns:
            limit = f"{self.allowed_ns / 1e6:.0f} are allowed"
            return f"{self.name}: {self.cpu_ns / 1e6:.0f} ms of CPU for {self.size} bytes, {limit}"
        if self.peak_bytes > self.allowed_bytes:
            return f"{self.name}: {self.peak_bytes >> 10} KiB for {self.size} bytes, {self.allowed_bytes >> 10} are allowed"
        return ""


def hostile_text(chance: random.Random, size: int) -> str:
    """Return one piece repeated, or a mixture."""
    if chance.random() < 0.7:
        piece = chance.choice(PIECES)
        return (piece * (size // len(piece) + 1))[:size]
    return "".join(chance.choices(PIECES, k=max(size // 3, 1)))[:size]


def hostile_json(chance: random.Random, size: int) -> str:
    """Return a JSON document with many parts, long parts, deep parts or great numbers."""
    kind, field = chance.randrange(6), chance.choice(FIELDS)
    if kind == 0:
        return json.dumps({field: hostile_text(chance, size)})
    if kind == 1:
        return json.dumps({f"{hostile_text(chance, 8)}{number}": "1" for number in range(size // 16)})
    if kind == 2:
        return f'{{"{field}": {"[" * (size // 2)}{"]" * (size // 2)}}}'
    if kind == 3:
        return f'{{"{field}": {chance.choice("19")}{"9" * size}{chance.choice(("", "e999999", ".5"))}}}'
    if kind == 4:
        return json.dumps({field: [{"node": number % 100} for number in range(size // 12)]})
    return json.dumps({field: {f"k{number}": {"upper": 1} for number in range(size // 20)}})


def pod_document(chance: random.Random, size: int) -> bytes:
    """Return a kubelet's list of one pod in which one part is hostile."""
    text = hostile_json(chance, size) if chance.random() < 0.5 else hostile_text(chance, size)
    metadata: dict[str, Any] = {"name": "web", "namespace": "shop", "uid": "uid-web", "annotations": {}, "labels": {}}
    container: dict[str, Any] = {"name": "main", "resources": {"requests": {"cpu": "1"}, "limits": {}}}
    spec: dict[str, Any] = {"containers": [container]}
    kind = chance.randrange(8)
    if kind <= 2:
        metadata["annotations"][chance.choice(KEYS)] = text
    elif kind == 3:
        metadata["labels"] = {f"koordinator.sh/{number}": "x" for number in range(size // 24)}
    elif kind == 4:
        metadata[chance.choice(("name", "namespace", "uid"))] = text
    elif kind == 5:
        container["resources"][chance.choice(("requests", "limits"))][chance.choice(("cpu", "memory"))] = text
    elif kind == 6:
        spec["containers"] = [{"name": f"c{number}"} for number in range(size // 16)]
    else:
        container["name"] = text
    return json.dumps({"items": [{"metadata": metadata, "spec": spec, "status": {}}]}).encode()


def parse_pods(body: bytes) -> Any:
    """Decode and join as one poll of the kubelet does."""
    try:
        listing = decode_pod_list(body, KubeletPodList())
    except InvalidPodList as error:
        return str(error)
    node = PodJoinContext(parsing=PodParsingContext(numa_nodes=(0, 1)), exists=lambda _path: True)
    return join_pods(listing, None, {}, node).problems


def runtime_answer(chance: random.Random, size: int) -> tuple[Any, Any]:
    """Return a runtime's lists with one hostile name."""
    names = ["web", "shop", "main", "a" * 64]
    names[chance.randrange(4)] = hostile_text(chance, size).replace("\ud800", "?")
    metadata = cri.PodSandboxMetadata(name=names[0], namespace=names[1], uid="uid-web")
    container = cri.Container(id=names[3], pod_sandbox_id="box", metadata=cri.ContainerMetadata(name=names[2]))
    container.state = cri.CONTAINER_RUNNING
    return (
        cri.ListPodSandboxResponse(items=[cri.PodSandbox(id="box", metadata=metadata)]),
        cri.ListContainersResponse(containers=[container]),
    )


def container_status(chance: random.Random, size: int) -> Any:
    """Return a verbose ContainerStatus whose specification is hostile."""
    path = hostile_text(chance, min(size, 4000) if chance.random() < 0.5 else size)
    spec = {"runtimeSpec": {"linux": {"cgroupsPath": path + chance.choice((":a:b", ".slice:a:b", ""))}}}
    text = json.dumps(spec) if chance.random() < 0.7 else hostile_json(chance, size)
    return cri.ContainerStatusResponse(info={"info": text})


def parse_indicator(text: str) -> Any:
    """Parse a pod's exposition."""
    try:
        return parse_histogram(text, "latency", 1)
    except InvalidIndicator as error:
        return str(error)


def exposition(chance: random.Random, size: int) -> str:
    """Return lines of a histogram with hostile labels and numbers."""
    text = hostile_text(chance, 40).replace("\n", "")
    line = f'latency_bucket{{le="{chance.choice(("1", "+Inf", text))}",a="{text}"}} {chance.choice(("1", text, "9" * 300))}\n'
    return line * (size // len(line) + 1)


def parse_signed(text: str) -> Any:
    """Read the annotation of a container that another agent may have written."""
    try:
        return SignedAnnotations(bytes(32)).read("a" * 64, text)
    except ValueError as error:
        return str(error)


CASES = (
    OutsideCase("kubelet", pod_document, parse_pods),
    OutsideCase("runtime", runtime_answer, lambda answers: join_runtime_lists(*answers)),
    OutsideCase("container-status", container_status, container_cgroup),
    OutsideCase("indicator", exposition, parse_indicator),
    OutsideCase("nri-annotation", hostile_json, parse_signed),
)


def reference_ns(size: int) -> int:
    """Return the CPU time of looking at so many characters once."""
    text = "a" * size
    began = time.thread_time_ns()
    for char in text:
        ord(char)
    return time.thread_time_ns() - began


def measure(case: OutsideCase, given: Any) -> ParsingCost:
    """Parse the input twice: for its CPU time, and for its memory. Raises what the parser raises."""
    size = _size_of(given)
    reference = reference_ns(size)
    began = time.thread_time_ns()
    case.parse(given)
    cpu_ns = time.thread_time_ns() - began
    tracemalloc.start()
    try:
        result = case.parse(given)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    msgspec.msgpack.encode(result, enc_hook=str)
    return ParsingCost(
        case.name,
        size,
        cpu_ns,
        REFERENCE_LIMIT * reference + MAX_EXTRA_NS,
        peak_bytes,
        MEMORY_LIMIT * size + MAX_EXTRA_BYTES,
    )


def _size_of(given: Any) -> int:
    if isinstance(given, tuple):
        return sum(map(_size_of, given))
    return len(given) if isinstance(given, (str, bytes)) else int(given.ByteSize())


def fuzz_outside(count: int, seed: int, max_chars: int = MAX_INPUT_CHARS) -> Iterator[ParsingCost | str]:
    """Yield the cost of each input, or the failure of its parser."""
    chance = random.Random(seed)
    for case in CASES:  # the first call of a parser also builds its decoders, which is not the input's cost
        case.parse(case.make(chance, 16))
    for index in range(count):
        case = CASES[index % len(CASES)]
        given = case.make(chance, chance.choice((1, 16, 300, max_chars >> 4, max_chars)))
        try:
            yield measure(case, given)
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            yield f"{case.name}: {type(error).__name__}: {error!s:.200}"
