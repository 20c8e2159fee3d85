"""Checks what the kubelet, the container runtime and NRI offer the agent, each request with a deadline. Each check that
fails names its remedy. Loaded only by `dioptase doctor --kubelet`, because it imports gRPC and aiohttp."""

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
from agent.sensors.pods.kubelet_configuration import KubeletConfigPoller, KubeletConfiguration
from agent.sensors.pods.kubelet_managers import POLICY_UNKNOWN, combine_managers, read_manager_state
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


class KubeletDiagnosis(msgspec.Struct, frozen=True):
    """The checks, and the pods that the kubelet lists."""

    checks: tuple[DoctorCheck, ...]
    pods: tuple[Pod, ...] = ()


def check_kubelet(config: AgentConfig, proc: Path = Path("/proc")) -> KubeletDiagnosis:
    """Check all of them, each with its deadline."""
    return asyncio.run(_check_kubelet(config, proc))


async def _check_kubelet(config: AgentConfig, proc: Path) -> KubeletDiagnosis:
    hierarchy = detect_hierarchy(proc)
    runtime, containers = await _check_runtime(config)
    pods, listed = await _check_pods(config, hierarchy, containers)
    nri, configuration = await _check_nri(config), await _fetch_configuration(config)
    managers = _check_managers(configuration, Path(config.kubelet.root_dir), config)
    checks = (pods, runtime, nri, *managers, _check_configuration(configuration, config, hierarchy))
    return KubeletDiagnosis(checks, listed)


async def _fetch_configuration(config: AgentConfig) -> KubeletConfiguration | Unavailable:
    async with KubeletClient(config.kubelet, CONFIGZ_PATH) as kubelet:
        poller = KubeletConfigPoller(kubelet)
        await poller.poll()
    answer = poller.configuration or poller.problem
    assert answer is not None
    return answer


async def _check_pods(
    config: AgentConfig, hierarchy: Hierarchy, containers: RuntimeContainers | None
) -> tuple[DoctorCheck, tuple[Pod, ...]]:
    try:
        async with KubeletClient(config.kubelet) as kubelet:
            listing = decode_pod_list(await kubelet.ask(), KubeletPodList())
    except (Unavailable, InvalidPodList) as error:
        remedy = error.remedy if isinstance(error, Unavailable) else "check that kubelet.url is the kubelet's"
        return DoctorCheck(name="kubelet", ok=False, detail=str(error), remedy=remedy), ()
    node = PodJoinContext(
        parsing=PodParsingContext(),
        exists=partial(cgroup_exists, hierarchy.primary),
        cgroup_root=config.kubelet.cgroup_root,
    )
    joined = join_pods(listing, containers, {}, node)
    if joined.containers_without_cgroup:
        detail = f"no cgroup of {', '.join(sorted(joined.containers_without_cgroup)[:3])}"
        remedy = "set kubelet.cgroupRoot to the kubelet's cgroupRoot, and mount the host's cgroups"
        return DoctorCheck(name="kubelet", ok=False, detail=detail, remedy=remedy), joined.pods()
    return DoctorCheck(
        name="kubelet", ok=True, detail=f"{config.kubelet.url} lists {len(listing.items)} pods"
    ), joined.pods()


async def _check_runtime(config: AgentConfig) -> tuple[DoctorCheck, RuntimeContainers | None]:
    socket = find_runtime_socket(config.kubelet.runtime_socket)
    if socket is None:
        remedy = "set kubelet.runtimeSocket; until then new containers are noticed some seconds late"
        return DoctorCheck(
            name="container runtime", ok=False, detail=f"none of {', '.join(RUNTIME_SOCKETS)} exists", remedy=remedy
        ), None
    runtime = ContainerRuntimeClient(socket, config.kubelet.timeout_s)
    try:
        containers = await runtime.list_running()
    except Unavailable as error:
        return DoctorCheck(name="container runtime", ok=False, detail=error.reason, remedy=error.remedy), None
    finally:
        await runtime.close()
    detail = f"{socket} runs {len(containers.running)} containers in {len(containers.sandboxes)} pods"
    return DoctorCheck(name="container runtime", ok=True, detail=detail), containers


async def _check_nri(config: AgentConfig) -> DoctorCheck:
    """Check only whether the socket accepts: a registered plugin would receive container events."""
    socket = nri_socket(config.kubelet.nri_socket)
    late = "until then a container runs some seconds with the kubelet's limits"
    if socket is None:
        remedy = f"enable NRI in the runtime's configuration (on in containerd 2), or set kubelet.nriSocket; {late}"
        return DoctorCheck(name="optional: NRI", ok=True, detail=f"there is no {NRI_SOCKET}", remedy=remedy)
    try:
        session = await connect_nri(socket, {}, config.kubelet.timeout_s)
    except Unavailable as error:
        return DoctorCheck(name="optional: NRI", ok=True, detail=error.reason, remedy=f"{error.remedy}; {late}")
    await session.close()
    return DoctorCheck(name="optional: NRI", ok=True, detail=f"{socket}: containers start with their limits")


def _check_managers(
    configuration: KubeletConfiguration | Unavailable, root: Path, config: AgentConfig
) -> tuple[DoctorCheck, ...]:
    """Check the managers as the agent does: by `/configz` and by the kubelet's files."""
    needs_cpusets, policies, state_files = config.advisor.policy == "canonical", None, None
    reasons: list[str] = []
    if isinstance(configuration, Unavailable):
        reasons.append(configuration.reason)
    else:
        policies = configuration
    try:
        state_files = read_manager_state(root)
    except Unavailable as error:
        reasons.append(error.reason)
    managers, source = (
        combine_managers(policies, state_files),
        f"by {CONFIGZ_PATH}" if policies is not None else f"by the files in {root}",
    )
    if managers.cpu == POLICY_UNKNOWN:
        detail = f"unknown: {'; '.join(reasons)}; no cpuset is written"
        remedy = "allow `get` of nodes/configz or nodes/proxy, or mount the kubelet's directory (kubelet.rootDir)"
        return (DoctorCheck(name="kubelet's managers", ok=not needs_cpusets, detail=detail, remedy=remedy),)
    exclusive = f"{sum(map(len, managers.exclusive.values()))} containers have exclusive CPUs"
    exclusive = exclusive if state_files is not None else "which containers have exclusive CPUs is unknown"
    cpu_detail = (
        f"{managers.cpu}, {source}: it writes the cpusets of all containers, the agent writes none; {exclusive}"
    )
    cpu = DoctorCheck(
        name="kubelet's CPU manager",
        ok=not (managers.manages_cpusets and needs_cpusets),
        detail=cpu_detail if managers.manages_cpusets else f"{managers.cpu}, {source}",
        remedy="set cpuManagerPolicy: none in the kubelet's configuration, or advisor.policy: latency"
        if managers.manages_cpusets
        else "",
    )
    memory = DoctorCheck(
        name="kubelet's memory manager",
        ok=True,
        detail=f"{managers.memory}, {source}" + (": it chooses NUMA nodes" if managers.mems else ""),
        remedy="set memoryManagerPolicy: None in the kubelet's configuration, so that the agent can bind pods"
        if managers.mems
        else "",
    )
    return cpu, memory


def _check_configuration(
    configuration: KubeletConfiguration | Unavailable, config: AgentConfig, hierarchy: Hierarchy
) -> DoctorCheck:
    name, root = "kubelet's configuration", config.kubelet.cgroup_root
    if isinstance(configuration, Unavailable):
        remedy = "allow `get` of nodes/proxy or nodes/configz, to check its cgroup driver and topology manager"
        return DoctorCheck(name=f"optional: {name}", ok=True, detail=configuration.reason, remedy=remedy)
    topology = f"topology manager {configuration.topology_manager_policy} ({configuration.topology_manager_scope})"
    detail = f"cgroupDriver {configuration.cgroup_driver}, cgroupRoot {configuration.cgroup_root or '/'}, {topology}"
    if (configuration.cgroup_root or "/").rstrip("/") != root.rstrip("/"):
        return DoctorCheck(
            name=name, ok=False, detail=detail, remedy=f"set kubelet.cgroupRoot: {configuration.cgroup_root}"
        )
    if configuration.cgroup_driver in set(CgroupDriver) and not cgroup_exists(
        hierarchy.primary, kubepods_path(root, CgroupDriver(configuration.cgroup_driver))
    ):
        remedy = "mount the host's /sys/fs/cgroup"
        return DoctorCheck(name=name, ok=False, detail=f"{detail}, which has no cgroup here", remedy=remedy)
    return DoctorCheck(name=name, ok=True, detail=detail)
