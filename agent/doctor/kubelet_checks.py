"""Checks what the kubelet, the container runtime and NRI offer the agent, each request with a deadline.
Each check that fails names its remedy. Loaded only by `dioptase doctor --kubelet`, because it imports gRPC and
aiohttp.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import msgspec

from agent.config.config import AgentConfig
from agent.config.loader import RUNTIME_SOCKETS, find_runtime_socket
from agent.nri.lifecycle import NRI_SOCKET, nri_socket
from agent.nri.session import connect_nri
from agent.sensors.cgroup.hierarchy import Hierarchy, cgroup_exists, detect_hierarchy
from agent.sensors.cgroup.pod_cgroup_paths import CgroupDriver, kubepods_path
from agent.sensors.pods.cri_client import ContainerRuntimeClient
from agent.sensors.pods.kubelet_client import CONFIGZ_PATH, KubeletClient
from agent.sensors.pods.kubelet_managers import POLICY_UNKNOWN, combine_managers, parse_configz, read_manager_state
from agent.sensors.pods.pod_join import (
    InvalidPodList,
    KubeletPodList,
    PodJoinContext,
    RuntimeContainers,
    decode_pod_list,
    join_pods,
)
from agent.sensors.pods.pod_spec import PodParsingContext
from api.diagnostics import DoctorCheck
from api.interfaces import Unavailable
from api.pod import Pod


class _KubeletConfiguration(msgspec.Struct, frozen=True, rename="camel"):
    cgroup_driver: str = "cgroupfs"
    cgroup_root: str = ""
    topology_manager_policy: str = "none"
    topology_manager_scope: str = "container"


class _Configz(msgspec.Struct, frozen=True):
    kubeletconfig: _KubeletConfiguration


class KubeletDiagnosis(msgspec.Struct, frozen=True):
    """What was found, and the pods that the kubelet lists."""

    checks: tuple[DoctorCheck, ...]
    pods: tuple[Pod, ...] = ()


def check_kubelet(config: AgentConfig, proc: Path = Path("/proc")) -> KubeletDiagnosis:
    """Ask all of them, each with its deadline."""
    return asyncio.run(_check_kubelet(config, proc))


async def _check_kubelet(config: AgentConfig, proc: Path) -> KubeletDiagnosis:
    hierarchy = detect_hierarchy(proc)
    runtime, looked = await _check_runtime(config)
    pods, listed = await _check_pods(config, hierarchy, looked)
    nri, said = await _check_nri(config), await _fetch_configz(config)
    managers = _check_managers(said, Path(config.kubelet.root_dir), config)
    return KubeletDiagnosis((pods, runtime, nri, *managers, _check_configz(said, config, hierarchy)), listed)


async def _fetch_configz(config: AgentConfig) -> bytes | Unavailable:
    """What the kubelet says of its configuration."""
    try:
        async with KubeletClient(config.kubelet, CONFIGZ_PATH) as kubelet:
            return await kubelet.ask()
    except Unavailable as error:
        return error


async def _check_pods(
    config: AgentConfig, hierarchy: Hierarchy, looked: RuntimeContainers | None
) -> tuple[DoctorCheck, tuple[Pod, ...]]:
    try:
        async with KubeletClient(config.kubelet) as kubelet:
            listing = decode_pod_list(await kubelet.ask(), KubeletPodList())
    except (Unavailable, InvalidPodList) as error:
        remedy = error.remedy if isinstance(error, Unavailable) else "see whether kubelet.url is the kubelet's"
        return DoctorCheck(name="kubelet", ok=False, detail=str(error), remedy=remedy), ()
    node = PodJoinContext(
        door=PodParsingContext(),
        exists=partial(cgroup_exists, hierarchy.primary),
        cgroup_root=config.kubelet.cgroup_root,
    )
    joined = join_pods(listing, looked, {}, node)
    if joined.containers_without_cgroup:
        detail = f"no cgroup was found of {', '.join(sorted(joined.containers_without_cgroup)[:3])}"
        remedy = "write in kubelet.cgroupRoot the kubelet's cgroupRoot, and have the agent see the host's cgroups"
        return DoctorCheck(name="kubelet", ok=False, detail=detail, remedy=remedy), joined.pods()
    return DoctorCheck(
        name="kubelet", ok=True, detail=f"{config.kubelet.url} lists {len(listing.items)} pods"
    ), joined.pods()


async def _check_runtime(config: AgentConfig) -> tuple[DoctorCheck, RuntimeContainers | None]:
    socket = find_runtime_socket(config.kubelet.runtime_socket)
    if socket is None:
        remedy = "name its socket in kubelet.runtimeSocket; until then new containers are seen some seconds late"
        return DoctorCheck(
            name="container runtime", ok=False, detail=f"none of {', '.join(RUNTIME_SOCKETS)} is there", remedy=remedy
        ), None
    runtime = ContainerRuntimeClient(socket, config.kubelet.timeout_s)
    try:
        looked = await runtime.look()
    except Unavailable as error:
        return DoctorCheck(name="container runtime", ok=False, detail=error.reason, remedy=error.remedy), None
    finally:
        await runtime.close()
    detail = f"{socket} runs {len(looked.running)} containers in {len(looked.sandboxes)} pods"
    return DoctorCheck(name="container runtime", ok=True, detail=detail), looked


async def _check_nri(config: AgentConfig) -> DoctorCheck:
    """Only whether somebody accepts: who registers is asked about containers."""
    socket = nri_socket(config.kubelet.nri_socket)
    late = "until then a container runs for some seconds as the kubelet made it"
    if socket is None:
        remedy = f"switch NRI on in the runtime's configuration (containerd 2 has it on), or kubelet.nriSocket; {late}"
        return DoctorCheck(name="optional: NRI", ok=True, detail=f"there is no {NRI_SOCKET}", remedy=remedy)
    try:
        session = await connect_nri(socket, {}, config.kubelet.timeout_s)
    except Unavailable as error:
        return DoctorCheck(name="optional: NRI", ok=True, detail=error.reason, remedy=f"{error.remedy}; {late}")
    await session.close()
    return DoctorCheck(name="optional: NRI", ok=True, detail=f"{socket}: containers are made with their limits")


def _check_managers(said: bytes | Unavailable, root: Path, config: AgentConfig) -> tuple[DoctorCheck, ...]:
    """As the agent finds them: by what the kubelet says, and by its files."""
    wants, policies, kept = config.advisor.policy == "canonical", None, None
    whys: list[str] = []
    try:
        policies = parse_configz(said) if isinstance(said, bytes) else None
        if isinstance(said, Unavailable):
            whys.append(said.reason)
    except Unavailable as error:
        whys.append(error.reason)
    try:
        kept = read_manager_state(root)
    except Unavailable as error:
        whys.append(error.reason)
    found, by = (
        combine_managers(policies, kept),
        f"as {CONFIGZ_PATH} says" if policies is not None else f"as files in {root} say",
    )
    if found.cpu == POLICY_UNKNOWN:
        detail = f"nobody tells: {'; '.join(whys)}; no list of CPUs or NUMA nodes is written here"
        remedy = "allow `get` of nodes/configz or nodes/proxy, or let the agent see the kubelet's directory (kubelet.rootDir)"
        return (DoctorCheck(name="kubelet's managers", ok=not wants, detail=detail, remedy=remedy),)
    alone = f"{sum(map(len, found.exclusive.values()))} containers have CPUs to themselves"
    alone = alone if kept is not None else "which containers have CPUs to themselves is not known"
    theirs = f"{found.cpu}, {by}: it writes the cpusets of all containers, and none is written here; {alone}"
    cpu = DoctorCheck(
        name="kubelet's CPU manager",
        ok=not (found.manages_cpusets and wants),
        detail=theirs if found.manages_cpusets else f"{found.cpu}, {by}",
        remedy="write cpuManagerPolicy: none in the kubelet's configuration, or have advisor.policy latency"
        if found.manages_cpusets
        else "",
    )
    memory = DoctorCheck(
        name="kubelet's memory manager",
        ok=True,
        detail=f"{found.memory}, {by}" + (": NUMA nodes are its to choose" if found.mems else ""),
        remedy="write memoryManagerPolicy: None in the kubelet's configuration, to have pods bound here"
        if found.mems
        else "",
    )
    return cpu, memory


def _check_configz(answer: bytes | Unavailable, config: AgentConfig, hierarchy: Hierarchy) -> DoctorCheck:
    name, root = "kubelet's configuration", config.kubelet.cgroup_root
    try:
        if isinstance(answer, Unavailable):
            raise answer
        said = msgspec.json.decode(answer, type=_Configz).kubeletconfig
    except (Unavailable, msgspec.MsgspecError, ValueError) as error:
        remedy = (
            "allow `get` of nodes/proxy or nodes/configz, to have its drivers and its topology manager checked here"
        )
        return DoctorCheck(name=f"optional: {name}", ok=True, detail=f"{error}", remedy=remedy)
    topology = f"topology manager {said.topology_manager_policy} ({said.topology_manager_scope})"
    detail = f"cgroupDriver {said.cgroup_driver}, cgroupRoot {said.cgroup_root or '/'}, {topology}"
    if (said.cgroup_root or "/").rstrip("/") != root.rstrip("/"):
        return DoctorCheck(name=name, ok=False, detail=detail, remedy=f"write kubelet.cgroupRoot: {said.cgroup_root}")
    if said.cgroup_driver in set(CgroupDriver) and not cgroup_exists(
        hierarchy.primary, kubepods_path(root, CgroupDriver(said.cgroup_driver))
    ):
        remedy = "have the agent see the host's cgroups: mount /sys/fs/cgroup of the host"
        return DoctorCheck(name=name, ok=False, detail=f"{detail}, of which there is no cgroup", remedy=remedy)
    return DoctorCheck(name=name, ok=True, detail=detail)
