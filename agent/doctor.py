"""What this node gives the agent, asked of the node itself: each answer with the remedy where it is no."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

from agent.hierarchy import Hierarchy, detect
from agent.qrm.knobs import KnobFiles
from agent.qrm.paths import below
from agent.qrm.table import LACKS, ONCE_FILES, TABLE
from agent.sense.node import NodeReader
from agent.sense.psi import STALL_US, WINDOW_US, open_trigger
from agent.sense.topology import read_topology
from api.checks import Check
from api.cpus import format_cpu_list
from api.knobs import Knob
from api.ports import Unavailable

REMEDIES = {
    Knob.CPUSET: "enable the cpuset controller: echo +cpuset > cgroup.subtree_control (v2), or mount it (v1)",
    Knob.WEIGHT: "enable the cpu controller",
    Knob.QUOTA: "enable the cpu controller",
    Knob.IDLE: "Linux 5.15 or newer; until then the lowest weight takes its place",
}
"""Knobs that the CPU policies turn, and what to do where there is none."""
MIN_FILES = 8192
"""Descriptors for some 1,000 cgroups; beyond them files are opened at every read, which costs five times as much."""


USUAL = ("/kubepods", "/kubepods.slice", "/system.slice", "/user.slice", "/machine.slice", "/docker", "/podman", "/lxc")
"""Cgroups that Kubernetes, systemd and container engines make below the root; any other may be somebody's experiment."""


def checks(
    state_dir: Path, proc: Path = Path("/proc"), sys: Path = Path("/sys"), *, pods: Sequence[str] = ()
) -> tuple[Check, ...]:
    """Findings about privileges, cgroups, knobs, pressure and limits, in the order in which they matter.

    Which knobs there are is asked of the cgroups `pods`, or where there are none, of those that are usual on a node.
    """
    found = [_privileges()]
    try:
        hierarchy = detect(proc)
    except (Unavailable, OSError) as error:
        remedy = error.remedy if isinstance(error, Unavailable) else f"mount the proc file system at {proc}"
        return (*found, Check(name="cgroups", ok=False, detail=str(error), remedy=remedy))
    topology = read_topology(sys)
    cpus = f"{len(topology.cpus)} CPUs ({format_cpu_list(topology.ids)}), {len(topology.numa_nodes)} NUMA node(s)"
    found.append(Check(name="cpus", ok=True, detail=cpus + (", SMT" if topology.smt else "")))
    found.append(Check(name="cgroups", ok=True, detail=f"{hierarchy.mode}, identified below {hierarchy.primary}"))
    found.append(_writable(hierarchy))
    found.extend(_knobs(hierarchy, pods))
    found.extend(_pressure(hierarchy, proc))
    found.extend(_sources(proc, sys))
    found.append(_state(state_dir))
    found.append(_files())
    return tuple(found)


def _privileges() -> Check:
    if os.geteuid() == 0:
        return Check(name="privileges", ok=True, detail="root")
    return Check(
        name="privileges",
        ok=False,
        detail=f"user {os.geteuid()}: other users' processes and most probes are out of reach",
        remedy="run as root, or give CAP_BPF, CAP_PERFMON and write access to the pods' cgroups",
    )


def _writable(hierarchy: Hierarchy) -> Check:
    obstacle = KnobFiles(hierarchy).obstacle()
    if obstacle is None:
        return Check(name="cgroup writes", ok=True, detail="cgroup files can be written")
    remedy = f"{obstacle.remedy}; until then decisions run dry"
    return Check(name="cgroup writes", ok=False, detail=obstacle.reason, remedy=remedy)


def _sources(proc: Path, sys: Path) -> list[Check]:
    """What /proc and /sys give. What many machines do not have is told, and is nothing wrong."""
    reader = NodeReader(proc, sys, live=proc == Path("/proc"))
    reader.read()
    problems, lacks = reader.problems(), reader.lacks()
    reader.close()
    error, remedy = (problems[0].error, problems[0].remedy) if problems else ("all of them are read", "")
    found = [Check(name="node files", ok=not problems, detail=error, remedy=remedy)]
    return found + [
        Check(name=f"optional: {source}", ok=True, detail=lack.reason, remedy=lack.remedy) for source, lack in lacks
    ]


def _knobs(hierarchy: Hierarchy, pods: Sequence[str]) -> list[Check]:
    """Which knobs this kernel has. Root groups lack most, so groups below are asked, where there are any."""
    files = KnobFiles(hierarchy)
    asked = [path for path in pods if below(hierarchy.primary, path).is_dir()]
    asked = asked or [path for path in USUAL if below(hierarchy.primary, path).is_dir()]
    if not asked:
        detail = "not checked: there is neither a pod's cgroup nor a usual one to ask"
        return [Check(name="knobs", ok=True, detail=detail, remedy="name your pods with --pods", checked=False)]
    return [_knob(knob, files, asked) for knob in (*TABLE, *ONCE_FILES)]


def _knob(knob: Knob, files: KnobFiles, candidates: Sequence[str]) -> Check:
    """Without the first four a node cannot be colocated; what else there is makes it better, and none of it is a fault."""
    asked = next((path for path in candidates if files.available(knob, path)), "")
    name = knob.value if knob in REMEDIES else f"optional: {knob.value}"
    if asked:
        return Check(name=name, ok=True, detail=f"there, asked of {asked}")
    detail, remedy = LACKS.get((knob, files.version), ("no cgroup has it", REMEDIES.get(knob, _enable(knob))))
    return Check(name=name, ok=knob not in REMEDIES, detail=detail, remedy=remedy)


def _enable(knob: Knob) -> str:
    controller = TABLE[knob].v2[0].controller if knob in TABLE and TABLE[knob].v2 else knob.value.partition(".")[0]
    return f"enable the {'memory' if knob in ONCE_FILES else controller} controller, or run a kernel that has it"


def _pressure(hierarchy: Hierarchy, proc: Path) -> list[Check]:
    if not (proc / "pressure/cpu").exists():
        remedy = "boot with psi=1 (CONFIG_PSI); until then spikes are seen by run-queue waits alone"
        return [Check(name="pressure", ok=False, detail="no /proc/pressure", remedy=remedy)]
    found = [Check(name="pressure", ok=True, detail="PSI is on")]
    try:
        trigger = open_trigger(proc / "pressure/cpu", STALL_US, WINDOW_US)
    except Unavailable as error:
        found.append(Check(name="pressure triggers", ok=False, detail=error.reason, remedy=error.remedy))
    else:
        found.append(Check(name="pressure triggers", ok=True, detail=f"window {trigger.window_us / 1e6:g} s"))
        trigger.close()
    if hierarchy.v2 is None:
        remedy = "mount the unified hierarchy beside version 1: mount -t cgroup2 none /sys/fs/cgroup/unified"
        found.append(Check(name="pressure of cgroups", ok=False, detail="version 1 has none", remedy=remedy))
    return found


def _state(state_dir: Path) -> Check:
    nearest = next(path for path in (state_dir, *state_dir.parents) if path.exists())
    good = os.access(nearest, os.W_OK)
    remedy = "" if good else f"make {state_dir} writable or choose another with --state-dir"
    return Check(
        name="state directory", ok=good, detail=f"{state_dir} {'can' if good else 'cannot'} be written", remedy=remedy
    )


def _files() -> Check:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = hard == resource.RLIM_INFINITY or hard >= MIN_FILES
    remedy = "" if enough else f"raise the limit: LimitNOFILE={MIN_FILES} or ulimit -Hn {MIN_FILES}"
    return Check(name="open files", ok=enough, detail=f"at most {hard}", remedy=remedy)
