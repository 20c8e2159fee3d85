"""What the kubelet and the container runtime give the agent, asked of them: each answer with the remedy where it is no."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import msgspec

from agent.config import Config
from agent.hierarchy import Hierarchy, detect
from agent.nri.session import connect
from agent.optional import exists
from agent.runtime_side import NRI_SOCKET, nri_socket
from agent.sense.cgroup_paths import Driver, top_path
from agent.sense.cri import Runtime
from agent.sense.kubelet import CONFIGZ, Kubelet
from agent.sense.kubelet_managers import UNKNOWN, policies_of, read, together
from agent.sense.podjoin import Node, join
from agent.sense.podlist import Garbage, Listing, decode
from agent.sense.podspec import Door
from agent.sense.running import SOCKETS, Looked, find_socket
from api.checks import Check
from api.pods import Pod
from api.ports import Unavailable


class _Kubelet(msgspec.Struct, frozen=True, rename="camel"):
    cgroup_driver: str = "cgroupfs"
    cgroup_root: str = ""
    topology_manager_policy: str = "none"
    topology_manager_scope: str = "container"


class _Configz(msgspec.Struct, frozen=True):
    kubeletconfig: _Kubelet


class Examined(msgspec.Struct, frozen=True):
    """What was found, and the pods that the kubelet lists."""

    checks: tuple[Check, ...]
    pods: tuple[Pod, ...] = ()


def examine(config: Config, proc: Path = Path("/proc")) -> Examined:
    """Ask all of them, each with its deadline."""
    return asyncio.run(_examine(config, proc))


async def _examine(config: Config, proc: Path) -> Examined:
    hierarchy = detect(proc)
    runtime, looked = await _runtime(config)
    pods, listed = await _pods(config, hierarchy, looked)
    nri, said = await _nri(config), await _asked(config)
    managers = _managers(said, Path(config.kubelet.root_dir), config)
    return Examined((pods, runtime, nri, *managers, _configz(said, config, hierarchy)), listed)


async def _asked(config: Config) -> bytes | Unavailable:
    """What the kubelet says of its configuration."""
    try:
        async with Kubelet(config.kubelet, CONFIGZ) as kubelet:
            return await kubelet.ask()
    except Unavailable as error:
        return error


async def _pods(config: Config, hierarchy: Hierarchy, looked: Looked | None) -> tuple[Check, tuple[Pod, ...]]:
    try:
        async with Kubelet(config.kubelet) as kubelet:
            listing = decode(await kubelet.ask(), Listing())
    except (Unavailable, Garbage) as error:
        remedy = error.remedy if isinstance(error, Unavailable) else "see whether kubelet.url is the kubelet's"
        return Check(name="kubelet", ok=False, detail=str(error), remedy=remedy), ()
    node = Node(door=Door(), exists=partial(exists, hierarchy.primary), cgroup_root=config.kubelet.cgroup_root)
    joined = join(listing, looked, {}, node)
    if joined.homeless:
        detail = f"no cgroup was found of {', '.join(sorted(joined.homeless)[:3])}"
        remedy = "write in kubelet.cgroupRoot the kubelet's cgroupRoot, and have the agent see the host's cgroups"
        return Check(name="kubelet", ok=False, detail=detail, remedy=remedy), joined.pods()
    return Check(name="kubelet", ok=True, detail=f"{config.kubelet.url} lists {len(listing.items)} pods"), joined.pods()


async def _runtime(config: Config) -> tuple[Check, Looked | None]:
    socket = find_socket(config.kubelet.runtime_socket)
    if socket is None:
        remedy = "name its socket in kubelet.runtimeSocket; until then new containers are seen some seconds late"
        return Check(
            name="container runtime", ok=False, detail=f"none of {', '.join(SOCKETS)} is there", remedy=remedy
        ), None
    runtime = Runtime(socket, config.kubelet.timeout_s)
    try:
        looked = await runtime.look()
    except Unavailable as error:
        return Check(name="container runtime", ok=False, detail=error.reason, remedy=error.remedy), None
    finally:
        await runtime.close()
    detail = f"{socket} runs {len(looked.running)} containers in {len(looked.sandboxes)} pods"
    return Check(name="container runtime", ok=True, detail=detail), looked


async def _nri(config: Config) -> Check:
    """Only whether somebody accepts: who registers is asked about containers."""
    socket = nri_socket(config.kubelet.nri_socket)
    late = "until then a container runs for some seconds as the kubelet made it"
    if socket is None:
        remedy = f"switch NRI on in the runtime's configuration (containerd 2 has it on), or kubelet.nriSocket; {late}"
        return Check(name="optional: NRI", ok=True, detail=f"there is no {NRI_SOCKET}", remedy=remedy)
    try:
        session = await connect(socket, {}, config.kubelet.timeout_s)
    except Unavailable as error:
        return Check(name="optional: NRI", ok=True, detail=error.reason, remedy=f"{error.remedy}; {late}")
    await session.close()
    return Check(name="optional: NRI", ok=True, detail=f"{socket}: containers are made with their limits")


def _managers(said: bytes | Unavailable, root: Path, config: Config) -> tuple[Check, ...]:
    """As the agent finds them: by what the kubelet says, and by its files."""
    wants, policies, kept = config.advisor.policy == "canonical", None, None
    whys: list[str] = []
    try:
        policies = policies_of(said) if isinstance(said, bytes) else None
        if isinstance(said, Unavailable):
            whys.append(said.reason)
    except Unavailable as error:
        whys.append(error.reason)
    try:
        kept = read(root)
    except Unavailable as error:
        whys.append(error.reason)
    found, by = together(policies, kept), f"as {CONFIGZ} says" if policies is not None else f"as files in {root} say"
    if found.cpu == UNKNOWN:
        detail = f"nobody tells: {'; '.join(whys)}; no list of CPUs or NUMA nodes is written here"
        remedy = "allow `get` of nodes/configz or nodes/proxy, or let the agent see the kubelet's directory (kubelet.rootDir)"
        return (Check(name="kubelet's managers", ok=not wants, detail=detail, remedy=remedy),)
    alone = f"{sum(map(len, found.exclusive.values()))} containers have CPUs to themselves"
    alone = alone if kept is not None else "which containers have CPUs to themselves is not known"
    theirs = f"{found.cpu}, {by}: it writes the cpusets of all containers, and none is written here; {alone}"
    cpu = Check(
        name="kubelet's CPU manager",
        ok=not (found.cpusets and wants),
        detail=theirs if found.cpusets else f"{found.cpu}, {by}",
        remedy="write cpuManagerPolicy: none in the kubelet's configuration, or have advisor.policy latency"
        if found.cpusets
        else "",
    )
    memory = Check(
        name="kubelet's memory manager",
        ok=True,
        detail=f"{found.memory}, {by}" + (": NUMA nodes are its to choose" if found.mems else ""),
        remedy="write memoryManagerPolicy: None in the kubelet's configuration, to have pods bound here"
        if found.mems
        else "",
    )
    return cpu, memory


def _configz(answer: bytes | Unavailable, config: Config, hierarchy: Hierarchy) -> Check:
    name, root = "kubelet's configuration", config.kubelet.cgroup_root
    try:
        if isinstance(answer, Unavailable):
            raise answer
        said = msgspec.json.decode(answer, type=_Configz).kubeletconfig
    except (Unavailable, msgspec.MsgspecError, ValueError) as error:
        remedy = (
            "allow `get` of nodes/proxy or nodes/configz, to have its drivers and its topology manager checked here"
        )
        return Check(name=f"optional: {name}", ok=True, detail=f"{error}", remedy=remedy)
    topology = f"topology manager {said.topology_manager_policy} ({said.topology_manager_scope})"
    detail = f"cgroupDriver {said.cgroup_driver}, cgroupRoot {said.cgroup_root or '/'}, {topology}"
    if (said.cgroup_root or "/").rstrip("/") != root.rstrip("/"):
        return Check(name=name, ok=False, detail=detail, remedy=f"write kubelet.cgroupRoot: {said.cgroup_root}")
    if said.cgroup_driver in set(Driver) and not exists(hierarchy.primary, top_path(root, Driver(said.cgroup_driver))):
        remedy = "have the agent see the host's cgroups: mount /sys/fs/cgroup of the host"
        return Check(name=name, ok=False, detail=f"{detail}, of which there is no cgroup", remedy=remedy)
    return Check(name=name, ok=True, detail=detail)
