"""Applies the node-wide controls of the settings: disks, io.cost, resctrl and OOM scores.
Every few seconds, values that differ from the settings are written again. It must not change what no setting
names; values of an earlier agent that are no longer configured are restored in the first cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from agent.config.qrm import KnobsConfig
from agent.qrm.actuator.disk_settings import DiskSettings
from agent.qrm.actuator.oom_scores import OomScores, ProcessTable
from agent.qrm.actuator.resctrl_groups import ResctrlWriter
from agent.qrm.decisions.oom_priority import decide_oom_scores
from agent.qrm.knobs.io import SysfsSetting, disk_settings
from agent.qrm.knobs.resctrl import GROUP_PREFIX, build_resctrl_groups
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.parsers import task_ids
from api.decision import Decision, Outcome
from api.interfaces import Unavailable
from api.measurements import Disk
from api.rates import cgroups_by_container
from api.snapshot import ComponentHealth, Snapshot
from common.files import read_small_file

DISKS, RESCTRL, OOM = "disk-settings", "resctrl-groups", "oom-scores"
"""Names of the sources that say what cannot be done."""
RECHECK_PERIOD_NS = 5_000_000_000
_MAX_FILE_BYTES = 1 << 20
PROC = Path("/proc")


class NodeKnobWriters(NamedTuple):
    """Those that write, each for its kind."""

    files: DiskSettings
    groups: ResctrlWriter
    scores: OomScores


class NodeKnobs:
    """What the settings say of disks, caches and processes, done and undone. `dry` writes nothing."""

    def __init__(self, config: KnobsConfig, hierarchy: Hierarchy, last_written: NodeKnobWriters, *, dry: bool) -> None:
        self._config, self._hierarchy, self._dry = config, hierarchy, dry
        self._files, self._groups, self._scores = last_written
        self._due_ns = 0
        self._sources: tuple[ComponentHealth, ...] = ()

    def run_cycle(self, snapshot: Snapshot, now_ns: int) -> tuple[tuple[Outcome, ...], tuple[ComponentHealth, ...]]:
        """What came of each knob, where it was looked at in this round, and what of the settings cannot be done."""
        if now_ns < self._due_ns:
            return (), self._sources
        self._due_ns = now_ns + RECHECK_PERIOD_NS
        disks, disk_problems = self._set_disks(snapshot)
        caches, cache_problems = self._set_caches(snapshot)
        scores, score_problems = self._set_scores(snapshot)
        self._sources = (*disk_problems, *cache_problems, *score_problems)
        return (*disks, *caches, *scores), self._sources

    def restore(self) -> tuple[Outcome, ...]:
        """Put all of it back. Raises Unavailable where the journal of originals cannot be written."""
        return (*self._groups.restore(), *self._scores.restore(), *self._files.restore())

    def _set_disks(self, snapshot: Snapshot) -> tuple[tuple[Outcome, ...], tuple[ComponentHealth, ...]]:
        config, disks = self._config.io, snapshot.node.disks
        if not disks:
            # Not seeing is no reason to put anything back.
            wanted = config.wbt_us or config.cost_qos or config.cost_model
            found = [("the node's disks are not known", "see the source node-files")] if wanted else []
            return (), _failure_status(DISKS, found)
        root = self._cost_root()
        settings = disk_settings(disks, config, root)
        outcomes = self._files.apply(settings, dry=self._dry)
        problems = list(self._undone(disks, root, settings))
        if not self._dry:
            try:
                outcomes += self._files.restore(settings)
            except Unavailable as error:
                problems.append((error.reason, error.remedy))
        return outcomes, _failure_status(DISKS, problems)

    def _undone(
        self, disks: Mapping[str, Disk], root: str | None, settings: tuple[SysfsSetting, ...]
    ) -> Iterator[tuple[str, str]]:
        config = self._config.io
        named = config.cost_qos.keys() | config.cost_model.keys()
        if named and root is None:
            remedy = "mount cgroup version 2 with the io controller, on a kernel with CONFIG_BLK_CGROUP_IOCOST"
            yield "io.cost is configured, and the root of version 2 has no io.cost.qos", remedy
        for name in sorted(named - disks.keys()):
            yield (
                f"io.cost is configured for {name:.40}, which is no disk of this node",
                f"choose from {', '.join(disks)}",
            )
        wanted = {kind for kind, limit in config.wbt_us.items() if limit >= 0}
        if wanted and not any(setting.reason.rule == "wbt" for setting in settings):
            kinds = ", ".join(sorted(wanted))
            yield (
                f"wbtUs is configured for {kinds}, and no such disk here throttles its write-back",
                "take it out, or use a kernel with CONFIG_BLK_WBT",
            )

    def _cost_root(self) -> str | None:
        root = self._hierarchy.v2
        if root is None or not (root / "io.cost.qos").exists() or not root.is_relative_to(self._files.sys):
            return None
        return str(root.relative_to(self._files.sys))

    def _set_caches(self, snapshot: Snapshot) -> tuple[tuple[Outcome, ...], tuple[ComponentHealth, ...]]:
        config = self._config.resctrl
        if not config.enabled:
            return () if self._dry else self._groups.restore(), ()
        try:
            wanted = build_resctrl_groups(self._groups.caches(), config.levels)
        except Unavailable as error:
            return (), _failure_status(RESCTRL, [(error.reason, error.remedy)])
        except ValueError as error:
            return (), _failure_status(RESCTRL, [(str(error), "correct knobs.resctrl.levels")])
        return self._groups.apply(wanted, self._threads(snapshot), dry=self._dry), ()

    def _set_scores(self, snapshot: Snapshot) -> tuple[tuple[Outcome, ...], tuple[ComponentHealth, ...]]:
        asked = self._config.oom_priority
        decisions = tuple(decide_oom_scores(snapshot)) if asked else ()
        outcomes = self._scores.apply(decisions, dry=self._dry)
        problems = []
        if decisions and not any(outcome.before for outcome in outcomes) and _has_threads(snapshot, decisions):
            remedy = "run the agent in the host's PID namespace, with its /proc"
            problems.append(("no process of any listed container can be seen", remedy))
        if not self._dry:
            # Not seeing a listed container is no reason to put anything back.
            listed = {container.cgroup for pod in snapshot.pods for container in pod.containers} if asked else set()
            try:
                outcomes += self._scores.restore(listed)
            except Unavailable as error:
                problems.append((error.reason, error.remedy))
        return outcomes, _failure_status(OOM, problems)

    def _threads(self, snapshot: Snapshot) -> Mapping[str, list[int]]:
        """Threads of the containers of each level, those of groups below them included, by name of the level's group."""
        found: dict[str, list[int]] = {}
        levels = {
            container.cgroup: pod.qos
            for pod in snapshot.pods
            if pod.qos in self._config.resctrl.levels
            for container in pod.containers
        }
        for container, paths in cgroups_by_container(snapshot.cgroups, levels).items():
            threads = found.setdefault(f"{GROUP_PREFIX}{levels[container].value}", [])
            for path in paths:
                threads += self._listed(path)
        return found

    def _listed(self, path: str) -> tuple[int, ...]:
        name = "tasks" if "cpu" in self._hierarchy.v1 else "cgroup.threads"
        try:
            return task_ids(read_small_file(self._hierarchy.primary / path.lstrip("/") / name, _MAX_FILE_BYTES))
        except OSError:
            return ()  # it has gone meanwhile


def open_node_knobs(
    config: KnobsConfig, hierarchy: Hierarchy, state: tuple[Path, str], sys: Path, *, dry: bool
) -> NodeKnobs:
    """`state` is the state directory and the boot. Raises Unavailable where its journal cannot be read."""
    scores = OomScores(ProcessTable(PROC, hierarchy.primary), *state)
    return NodeKnobs(
        config,
        hierarchy,
        NodeKnobWriters(DiskSettings(sys, *state), ResctrlWriter(sys / "fs/resctrl"), scores),
        dry=dry,
    )


def _has_threads(snapshot: Snapshot, decisions: Iterable[Decision]) -> bool:
    return any(snapshot.cgroups[decision.cgroup].threads for decision in decisions)


def _failure_status(name: str, found: list[tuple[str, str]]) -> tuple[ComponentHealth, ...]:
    if not found:
        return ()
    error, remedy = "; ".join(reason for reason, _ in found), "; ".join(remedy for _, remedy in found)
    return (ComponentHealth(name=name, ok=False, error=error, remedy=remedy),)
