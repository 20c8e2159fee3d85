"""What this node gives the agent, asked of the node itself: each answer with the remedy where it is no."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from agent.hierarchy import Hierarchy, detect
from agent.qrm.knobs import KnobFiles
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


def checks(state_dir: Path, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> tuple[Check, ...]:
    """Findings about privileges, cgroups, knobs, pressure and limits, in the order in which they matter."""
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
    found.extend(_knobs(hierarchy))
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


def _knobs(hierarchy: Hierarchy) -> list[Check]:
    """Which knobs this kernel has. Root groups lack most, so a child group is asked where there is one."""
    files = KnobFiles(hierarchy)
    children = [f"/{entry.name}" for entry in os.scandir(hierarchy.primary) if entry.is_dir()]
    if not children:
        return [Check(name="knobs", ok=True, detail="no cgroup to ask: known as soon as a pod's cgroup exists")]
    return [_knob(knob, files, children) for knob in (*TABLE, *ONCE_FILES)]


def _knob(knob: Knob, files: KnobFiles, children: list[str]) -> Check:
    """Without the first four a node cannot be colocated; what else there is makes it better, and none of it is a fault."""
    asked = next((child for child in children if files.available(knob, child)), "")
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
