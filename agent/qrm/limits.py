"""What a decision has to fit into: the machine, the owner's own values, and what else this round is going to do."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from agent.qrm.bounds import Limits, at_most
from agent.qrm.knobs import KnobFiles, Reading
from agent.qrm.notation import number
from agent.qrm.originals import Originals
from agent.qrm.places import pages
from agent.qrm.plans import RoundState
from agent.qrm.restore import LISTS
from api.cpus import parse_cpu_list
from api.decisions import Decision
from api.knobs import Knob
from api.ports import Unavailable

STEP_BYTES = 256 << 20
"""A limit on memory is lowered by so much of what has to be given up at a time: dropping that much page cache takes about
0.1 s, and the round waits for it."""
SLACK_BYTES = 8 << 20
"""Page cache that is not counted on: of the last few MiB the kernel often finds nothing to drop, and gives up."""
USE = {"v1": "memory.usage_in_bytes", "v2": "memory.current"}
"""Where each version says how many bytes a group uses."""
_CACHE = {"v1": ("total_inactive_file", "total_active_file"), "v2": ("inactive_file", "active_file")}
_STUCK = {
    "v1": ("total_dirty", "total_writeback", "total_unevictable"),
    "v2": ("file_dirty", "file_writeback", "unevictable"),
}
STEPPED = (Knob.MEMORY_MAX, Knob.MEMORY_HIGH)
"""The kernel reclaims at once what is above these, while the one who writes them waits."""
_OWNED = (Knob.MEMORY_MAX, Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN, Knob.SWAP_MAX, Knob.IO_MAX)


def limits_of(
    decision: Decision,
    asked: str,
    before: str,
    files: KnobFiles,
    state: RoundState,
    own: str,
) -> Limits:
    """What bounds this decision, which asks for a canonical value where there is `before`;
    `own` is what the owner has set. Raises Unavailable."""
    cgroup, knob = decision.cgroup, decision.knob
    machine = Limits(cpu_count=state.cpu_count, inherits=files.version == "v2")
    if knob in LISTS:
        above = (cgroup.rpartition("/")[0], knob)
        if above in state.lists:
            # What lies below a container follows it, and what its owner pinned there stays within that.
            whole, pinned = parse_cpu_list(state.lists[above]), set(parse_cpu_list(own))
            return replace(machine, ceiling=tuple(cpu for cpu in whole if cpu in pinned) or whole)
        if above not in state.ceilings:
            state.ceilings[above] = files.ceiling(cgroup, knob)
        return replace(machine, ceiling=state.ceilings[above])
    if knob is Knob.QUOTA:
        return replace(machine, own_quota=own)
    if knob is Knob.BURST:
        quota = state.quotas.get(cgroup) or files.read(cgroup, decision.cgroup_id, Knob.QUOTA)
        return replace(machine, quota=quota)
    if knob in (Knob.WEIGHT, Knob.IO_WEIGHT):
        return replace(machine, weights=files.weights(cgroup, knob))
    floor = 0
    if knob in STEPPED and at_most(asked, before) == asked != before:
        floor = floor_bytes(decision, int(asked), files)
    return replace(machine, own=own if knob in _OWNED else None, floor_bytes=floor)


def own_value(
    decision: Decision, reading: Reading, theirs: str | None, files: KnobFiles, originals: Originals | None
) -> str:
    """What the owner set: `theirs` where that is what is there now, the journalled original, or what was read if the agent
    never wrote that knob."""
    entry = originals.find(decision.cgroup, decision.cgroup_id, decision.knob) if originals else None
    if theirs is not None:
        return theirs
    raw = reading.raw if entry is None else entry.raw
    return files.decode(decision.cgroup, decision.knob, raw, reading.beside)


def floor_bytes(decision: Decision, asked_bytes: int, files: KnobFiles) -> int:
    """The lowest limit on memory that the kernel can keep without killing somebody, as far as one can know.

    It is what is used now without half of the clean page cache: the other half is room for what the group takes while the
    limit is being written. A limit is therefore lowered in steps, one a round. memory.high kills nobody: only the step
    counts.
    """
    cgroup, cgroup_id = decision.cgroup, decision.cgroup_id
    try:
        used = number(files.read_text(cgroup, cgroup_id, "memory", USE[files.version]))
        if used <= asked_bytes:
            return 0
        if decision.knob is Knob.MEMORY_HIGH:
            return pages(max(used - STEP_BYTES, 0))
        stat = _stat(files.read_text(cgroup, cgroup_id, "memory", "memory.stat"))
    except ValueError as error:
        raise Unavailable(f"{cgroup}: nobody knows how much memory it uses: {error}", "see its memory.stat") from None
    cache = sum(stat.get(key, 0) for key in _CACHE[files.version])
    free = max(cache - sum(stat.get(key, 0) for key in _STUCK[files.version]) - SLACK_BYTES, 0)
    return pages(used - min(free // 2, STEP_BYTES))


def _stat(text: str) -> Mapping[str, int]:
    pairs = (line.partition(" ") for line in text.splitlines())
    return {key: number(value) for key, _, value in pairs}
