"""Checks what this node offers the agent: privileges, cgroups, knobs, pressure stall information and limits. Each check
that fails names its remedy. It reads the node and changes nothing; it must not import gRPC or aiohttp."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

from agent.qrm.actuator.writer import KnobWriter, cgroup_directory
from agent.qrm.knobs.knob_files import KNOB_SPECS, ONE_SHOT_FILES, UNSUPPORTED
from agent.sensors.cgroup.hierarchy import Hierarchy, detect_hierarchy
from agent.sensors.node.machine import read_topology
from agent.sensors.node.node_reader import NodeReader
from agent.sensors.triggers.psi_triggers import STALL_US, WINDOW_US, open_psi_trigger
from api.cpu import format_cpu_list
from api.diagnostics import DoctorCheck
from api.interfaces import Unavailable
from api.knobs import Knob
from api.units import US_PER_S

KNOB_REMEDIES = {
    Knob.CPUSET: "enable the cpuset controller: echo +cpuset > cgroup.subtree_control (v2), or mount it (v1)",
    Knob.WEIGHT: "enable the cpu controller",
    Knob.QUOTA: "enable the cpu controller",
    Knob.IDLE: "Linux 5.15 or newer; until then the lowest weight takes its place",
}
"""Knobs that the CPU policies need, and what to do without them."""
MIN_OPEN_FILES = 8192
"""Descriptors for some 1,000 cgroups; beyond them files are opened at every read, which costs five times as much."""


COMMON_CGROUPS = (
    "/kubepods", "/kubepods.slice", "/system.slice", "/user.slice", "/machine.slice", "/docker", "/podman", "/lxc",
)  # fmt: skip
"""Cgroups that Kubernetes, systemd and container engines create below the root; others may be experiments."""


def check_host(
    state_dir: Path, proc: Path = Path("/proc"), sys: Path = Path("/sys"), *, pods: Sequence[str] = ()
) -> tuple[DoctorCheck, ...]:
    """Return checks of privileges, cgroups, knobs, pressure and limits, the most important first.

    Knobs are checked in the cgroups `pods`, or without any in the common cgroups of a node.
    """
    checks = [_check_privileges()]
    try:
        hierarchy = detect_hierarchy(proc)
    except (Unavailable, OSError) as error:
        remedy = error.remedy if isinstance(error, Unavailable) else f"mount the proc file system at {proc}"
        return (*checks, DoctorCheck(name="cgroups", ok=False, detail=str(error), remedy=remedy))
    topology = read_topology(sys)
    cpus = f"{len(topology.cpus)} CPUs ({format_cpu_list(topology.ids)}), {len(topology.numa_nodes)} NUMA node(s)"
    checks.append(DoctorCheck(name="cpus", ok=True, detail=cpus + (", SMT" if topology.smt else "")))
    checks.append(
        DoctorCheck(name="cgroups", ok=True, detail=f"{hierarchy.mode}, identified below {hierarchy.primary}")
    )
    checks.append(_check_cgroup_writes(hierarchy))
    checks.extend(_check_knobs(hierarchy, pods))
    checks.extend(_check_pressure(hierarchy, proc))
    checks.extend(_check_node_files(proc, sys))
    checks.append(_check_state_dir(state_dir))
    checks.append(_check_open_files())
    return tuple(checks)


def _check_privileges() -> DoctorCheck:
    if os.geteuid() == 0:
        return DoctorCheck(name="privileges", ok=True, detail="root")
    return DoctorCheck(
        name="privileges",
        ok=False,
        detail=f"user {os.geteuid()} cannot read other users' processes or load most probes",
        remedy="run as root, or give CAP_BPF, CAP_PERFMON and write access to the pods' cgroups",
    )


def _check_cgroup_writes(hierarchy: Hierarchy) -> DoctorCheck:
    obstacle = KnobWriter(hierarchy).write_obstacle()
    if obstacle is None:
        return DoctorCheck(name="cgroup writes", ok=True, detail="cgroup files can be written")
    remedy = f"{obstacle.remedy}; until then decisions run dry"
    return DoctorCheck(name="cgroup writes", ok=False, detail=obstacle.reason, remedy=remedy)


def _check_node_files(proc: Path, sys: Path) -> list[DoctorCheck]:
    """Check /proc and /sys. What many machines lack is reported, and is no failure."""
    reader = NodeReader(proc, sys, live=proc == Path("/proc"))
    reader.read()
    problems, lacks = reader.problems(), reader.lacks()
    reader.close()
    error, remedy = (problems[0].error, problems[0].remedy) if problems else ("all of them are read", "")
    checks = [DoctorCheck(name="node files", ok=not problems, detail=error, remedy=remedy)]
    return checks + [
        DoctorCheck(name=f"optional: {source}", ok=True, detail=lack.reason, remedy=lack.remedy)
        for source, lack in lacks
    ]


def _check_knobs(hierarchy: Hierarchy, pods: Sequence[str]) -> list[DoctorCheck]:
    """Check which knobs this kernel has. Root cgroups lack most, so cgroups below are checked."""
    files = KnobWriter(hierarchy)
    cgroups = [path for path in pods if cgroup_directory(hierarchy.primary, path).is_dir()]
    cgroups = cgroups or [path for path in COMMON_CGROUPS if cgroup_directory(hierarchy.primary, path).is_dir()]
    if not cgroups:
        detail = "not checked: there is neither a pod's cgroup nor a common one"
        return [
            DoctorCheck(name="knobs", ok=True, detail=detail, remedy="name your pods with --pods", conclusive=False)
        ]
    return [_check_knob(knob, files, cgroups) for knob in (*KNOB_SPECS, *ONE_SHOT_FILES)]


def _check_knob(knob: Knob, files: KnobWriter, candidates: Sequence[str]) -> DoctorCheck:
    """Check one knob. Only the knobs of KNOB_REMEDIES are necessary; others are optional."""
    cgroup = next((path for path in candidates if files.available(knob, path)), "")
    name = knob.value if knob in KNOB_REMEDIES else f"optional: {knob.value}"
    if cgroup:
        return DoctorCheck(name=name, ok=True, detail=f"available in {cgroup}")
    detail, remedy = UNSUPPORTED.get(
        (knob, files.version), ("no cgroup has it", KNOB_REMEDIES.get(knob, _enable_remedy(knob)))
    )
    return DoctorCheck(name=name, ok=knob not in KNOB_REMEDIES, detail=detail, remedy=remedy)


def _enable_remedy(knob: Knob) -> str:
    controller = (
        KNOB_SPECS[knob].v2[0].controller
        if knob in KNOB_SPECS and KNOB_SPECS[knob].v2
        else knob.value.partition(".")[0]
    )
    return f"enable the {'memory' if knob in ONE_SHOT_FILES else controller} controller, or run a kernel that has it"


def _check_pressure(hierarchy: Hierarchy, proc: Path) -> list[DoctorCheck]:
    if not (proc / "pressure/cpu").exists():
        remedy = "boot with psi=1 (CONFIG_PSI); until then only run-queue latency shows spikes"
        return [DoctorCheck(name="pressure", ok=False, detail="no /proc/pressure", remedy=remedy)]
    checks = [DoctorCheck(name="pressure", ok=True, detail="PSI is on")]
    try:
        trigger = open_psi_trigger(proc / "pressure/cpu", STALL_US, WINDOW_US)
    except Unavailable as error:
        checks.append(DoctorCheck(name="pressure triggers", ok=False, detail=error.reason, remedy=error.remedy))
    else:
        checks.append(
            DoctorCheck(name="pressure triggers", ok=True, detail=f"window {trigger.window_us / US_PER_S:g} s")
        )
        trigger.close()
    if hierarchy.v2 is None:
        remedy = "mount the unified hierarchy in addition to version 1: mount -t cgroup2 none /sys/fs/cgroup/unified"
        checks.append(DoctorCheck(name="pressure of cgroups", ok=False, detail="version 1 has none", remedy=remedy))
    return checks


def _check_state_dir(state_dir: Path) -> DoctorCheck:
    nearest = next(path for path in (state_dir, *state_dir.parents) if path.exists())
    writable = os.access(nearest, os.W_OK)
    remedy = "" if writable else f"make {state_dir} writable, or set --state-dir"
    return DoctorCheck(
        name="state directory",
        ok=writable,
        detail=f"{state_dir} {'can' if writable else 'cannot'} be written",
        remedy=remedy,
    )


def _check_open_files() -> DoctorCheck:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES
    remedy = "" if enough else f"raise the limit: LimitNOFILE={MIN_OPEN_FILES} or ulimit -Hn {MIN_OPEN_FILES}"
    return DoctorCheck(name="open files", ok=enough, detail=f"at most {hard}", remedy=remedy)
