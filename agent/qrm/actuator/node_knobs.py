"""Applies the node-wide controls: disks, io.cost, resctrl, OOM scores and power limits.
Every few seconds, values that differ from the settings are written again. It must not change what no setting
names; values of an earlier agent that are no longer configured are restored in the first cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from agent.config.qrm import KnobsConfig
from agent.qrm.actuator.boot_journal import NOT_ON_DISK_YET
from agent.qrm.actuator.oom_scores import OomScores, ProcessTable
from agent.qrm.actuator.power_limits import PowerLimits
from agent.qrm.actuator.resctrl_groups import ResctrlWriter
from agent.qrm.actuator.sysfs_writer import DISK_KNOBS, SysfsWriter
from agent.qrm.decisions.memory_controls import decide_oom_scores
from agent.qrm.knobs.io import SysfsSetting, disk_settings
from agent.qrm.knobs.resctrl import GROUP_PREFIX, build_resctrl_groups
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.parsers import task_ids
from api.advice import NodeAdvice, PowerCap
from api.decision import Decision, Outcome
from api.interfaces import Unavailable
from api.rates import cgroups_by_container
from api.snapshot import ComponentHealth, Disk, Snapshot
from common.disk_writer import INLINE_WRITER, FileWriter
from common.files import read_small_file

DISKS, RESCTRL, OOM, POWER = "disk-settings", "resctrl-groups", "oom-scores", "power-limits"
"""Names of the components that report what cannot be applied."""
RECHECK_PERIOD_NS = 5_000_000_000
_MAX_FILE_BYTES = 1 << 20
PROC = Path("/proc")


class NodeKnobs:
    """Applies and restores the settings of disks, caches and processes; `dry` writes nothing."""

    def __init__(
        self,
        config: KnobsConfig,
        hierarchy: Hierarchy,
        writers: tuple[SysfsWriter, ResctrlWriter, OomScores],
        *,
        dry: bool,
    ) -> None:
        self._config, self._hierarchy, self._dry = config, hierarchy, dry
        self._files, self._groups, self._scores = writers
        self._power = PowerLimits(self._files)
        self._power_cap: PowerCap | None = None
        self._due_ns = 0
        self._health: tuple[ComponentHealth, ...] = ()

    def run_cycle(
        self, snapshot: Snapshot, now_ns: int, advice: NodeAdvice | None = None
    ) -> tuple[tuple[Outcome, ...], tuple[ComponentHealth, ...]]:
        """Return the outcomes, empty between checks, and the health of each component with problems.

        Without `advice`, because the advisor failed, power limits stay as they are.
        """
        cap = None if advice is None else advice.power_cap
        if now_ns < self._due_ns and cap == self._power_cap:
            return (), self._health
        self._power_cap = cap
        self._due_ns = now_ns + RECHECK_PERIOD_NS
        disks, disk_problems = self._set_disks(snapshot)
        caches, cache_problems = self._set_caches(snapshot)
        scores, score_problems = self._set_scores(snapshot)
        limits, limit_problems = ((), []) if advice is None else self._power.apply(advice, dry=self._dry)
        self._health = (*disk_problems, *cache_problems, *score_problems, *_failure_status(POWER, limit_problems))
        outcomes = (*disks, *caches, *scores, *limits)
        if any(outcome.error == NOT_ON_DISK_YET for outcome in outcomes):
            self._due_ns = now_ns
        return outcomes, self._health

    def restore(self) -> tuple[Outcome, ...]:
        """Restore all controls. Raises Unavailable if the journal of originals cannot be written."""
        return (*self._groups.restore(), *self._scores.restore(), *self._files.restore())

    def _set_disks(self, snapshot: Snapshot) -> tuple[tuple[Outcome, ...], tuple[ComponentHealth, ...]]:
        config, disks = self._config.io, snapshot.node.disks
        if not disks:
            # A failed reading of the disks is no reason to restore anything.
            configured = config.wbt_us or config.cost_qos or config.cost_model
            failures = (
                [("the node's disks are not known", "see the component node-files in dioptase doctor")]
                if configured
                else []
            )
            return (), _failure_status(DISKS, failures)
        root = self._cost_root()
        settings = disk_settings(disks, config, root)
        outcomes = self._files.apply(settings, dry=self._dry)
        problems = list(self._disk_problems(disks, root, settings))
        if not self._dry:
            try:
                outcomes += self._files.restore(settings, DISK_KNOBS)
            except Unavailable as error:
                problems.append((error.reason, error.remedy))
        return outcomes, _failure_status(DISKS, problems)

    def _disk_problems(
        self, disks: Mapping[str, Disk], root: str | None, settings: tuple[SysfsSetting, ...]
    ) -> Iterator[tuple[str, str]]:
        config = self._config.io
        disk_names = config.cost_qos.keys() | config.cost_model.keys()
        if disk_names and root is None:
            remedy = "mount cgroup version 2 with the io controller, on a kernel with CONFIG_BLK_CGROUP_IOCOST"
            yield "io.cost is configured, and the root of version 2 has no io.cost.qos", remedy
        for name in sorted(disk_names - disks.keys()):
            yield (
                f"io.cost is configured for {name:.40}, which is no disk of this node",
                f"choose from {', '.join(disks)}",
            )
        kinds = {kind for kind, limit in config.wbt_us.items() if limit >= 0}
        if kinds and not any(setting.reason.rule == "wbt" for setting in settings):
            listed = ", ".join(sorted(kinds))
            yield (
                f"wbtUs is configured for {listed}, and no such disk of this node throttles its write-back",
                "remove the setting, or use a kernel with CONFIG_BLK_WBT",
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
            groups = build_resctrl_groups(self._groups.caches(), config.levels)
        except Unavailable as error:
            return (), _failure_status(RESCTRL, [(error.reason, error.remedy)])
        except ValueError as error:
            return (), _failure_status(RESCTRL, [(str(error), "correct knobs.resctrl.levels")])
        return self._groups.apply(groups, self._threads(snapshot), dry=self._dry), ()

    def _set_scores(self, snapshot: Snapshot) -> tuple[tuple[Outcome, ...], tuple[ComponentHealth, ...]]:
        enabled = self._config.oom_priority
        decisions = tuple(decide_oom_scores(snapshot)) if enabled else ()
        outcomes = self._scores.apply(decisions, dry=self._dry)
        problems = []
        if decisions and not any(outcome.before for outcome in outcomes) and _has_threads(snapshot, decisions):
            remedy = "run the agent in the host's PID namespace, with its /proc"
            problems.append(("no process of any listed container can be seen", remedy))
        if not self._dry:
            # A listed container without a cgroup is no reason to restore anything.
            cgroups = {container.cgroup for pod in snapshot.pods for container in pod.containers} if enabled else set()
            try:
                outcomes += self._scores.restore(cgroups)
            except Unavailable as error:
                problems.append((error.reason, error.remedy))
        return outcomes, _failure_status(OOM, problems)

    def _threads(self, snapshot: Snapshot) -> Mapping[str, list[int]]:
        """Return the threads of the containers of each level, by name of the level's group."""
        threads_by_group: dict[str, list[int]] = {}
        levels = {
            container.cgroup: pod.qos
            for pod in snapshot.pods
            if pod.qos in self._config.resctrl.levels
            for container in pod.containers
        }
        for container, paths in cgroups_by_container(snapshot.cgroups, levels).items():
            threads = threads_by_group.setdefault(f"{GROUP_PREFIX}{levels[container].value}", [])
            for path in paths:
                threads += self._thread_ids(path)
        return threads_by_group

    def _thread_ids(self, path: str) -> tuple[int, ...]:
        name = "tasks" if "cpu" in self._hierarchy.v1 else "cgroup.threads"
        try:
            return task_ids(read_small_file(self._hierarchy.primary / path.lstrip("/") / name, _MAX_FILE_BYTES))
        except OSError:
            return ()  # the cgroup was removed


def open_node_knobs(
    config: KnobsConfig,
    hierarchy: Hierarchy,
    state: tuple[Path, str],
    sys: Path,
    *,
    dry: bool,
    disk: FileWriter = INLINE_WRITER,
) -> NodeKnobs:
    """Open the writers; `state` is the state directory and the boot id. Raises Unavailable if a journal cannot be
    read."""
    scores = OomScores(ProcessTable(PROC, hierarchy.primary), *state, disk)
    files = SysfsWriter(sys, *state, disk)
    return NodeKnobs(config, hierarchy, (files, ResctrlWriter(sys / "fs/resctrl"), scores), dry=dry)


def _has_threads(snapshot: Snapshot, decisions: Iterable[Decision]) -> bool:
    return any(snapshot.cgroups[decision.cgroup].threads for decision in decisions)


def _failure_status(name: str, failures: list[tuple[str, str]]) -> tuple[ComponentHealth, ...]:
    if not failures:
        return ()
    error, remedy = "; ".join(reason for reason, _ in failures), "; ".join(remedy for _, remedy in failures)
    return (ComponentHealth(name=name, ok=False, error=error, remedy=remedy),)
