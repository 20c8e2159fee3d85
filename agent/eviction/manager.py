"""The eviction manager: evaluates every enabled plugin and selects the victims of this cycle.
It is pure. A hard threshold that was met for its tolerance evicts its first candidate; all soft thresholds together
evict one pod of the node. A pod that was sent is excluded while terminating, so that one cause evicts no second
pod. It must not do I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from agent.config.eviction import PLUGIN_NAMES, EvictionConfig
from agent.eviction.eviction_inputs import DEFAULT_GRACE_S, EvictionInputs, exclusion_ns, termination_wait_ns
from agent.eviction.finding import PLUGIN_FAILED, EvictionFinding, missing_input_finding, not_met_finding
from agent.eviction.plugins import (
    cpu_pressure_load,
    cpu_pressure_suppression,
    koordinator_cpu_evict,
    koordinator_memory_evict,
    network_eviction,
    node_power_pressure,
    numa_cpu_pressure,
    numa_memory_pressure,
    numa_sys_cpu_pressure,
    oomd_pressure,
    reclaimed_numa_resource_pressure,
    reclaimed_resource_pressure,
    rootfs_overuse,
    rootfs_pressure,
    rss_overuse,
    system_memory_pressure,
)
from agent.eviction.plugins.cpu_pressure_load import CpuLoadState
from agent.eviction.plugins.cpu_pressure_suppression import CpuSuppressionState
from agent.eviction.plugins.koordinator_cpu_evict import KoordinatorCpuState
from agent.eviction.plugins.network_eviction import NetworkEvictionState
from agent.eviction.plugins.node_power_pressure import NodePowerEvictionState
from agent.eviction.plugins.numa_cpu_pressure import NumaCpuState
from agent.eviction.plugins.numa_memory_pressure import NumaMemoryPressureState
from agent.eviction.plugins.numa_sys_cpu_pressure import NumaSysCpuState
from agent.eviction.plugins.oomd_pressure import OomdState
from agent.eviction.plugins.system_memory_pressure import SystemMemoryPressureState
from agent.eviction.victims import SentEviction, propose_evictions, select_victims
from api.eviction import ActiveCondition, EvictionResult, EvictionThreshold, EvictionVictim, ThresholdMet
from api.units import NS_PER_S


class PluginStates(msgspec.Struct, frozen=True, kw_only=True):
    """The state of each plugin. A plugin that is disabled, fails or has no recent snapshot loses its state."""

    numa_memory: NumaMemoryPressureState = NumaMemoryPressureState()
    system_memory: SystemMemoryPressureState = SystemMemoryPressureState()
    network: NetworkEvictionState = NetworkEvictionState()
    load: CpuLoadState = CpuLoadState()
    suppression: CpuSuppressionState = CpuSuppressionState()
    numa_cpu: NumaCpuState = NumaCpuState()
    numa_sys: NumaSysCpuState = NumaSysCpuState()
    koordinator_cpu: KoordinatorCpuState = KoordinatorCpuState()
    oomd: OomdState = OomdState()
    power: NodePowerEvictionState = NodePowerEvictionState()


class EvictionState(msgspec.Struct, frozen=True, kw_only=True):
    """The state between two evaluations; the default is that of a new agent."""

    evaluated_at_ns: int | None = None
    latest: EvictionResult = EvictionResult()
    """The result of the latest evaluation, which holds until the next one."""
    met_since_ns: Mapping[str, int] = {}
    """Since when each threshold is met, by plugin, scope, subject and level."""
    conditions: Mapping[str, ActiveCondition] = {}
    """Active conditions by name, without those of dry runs."""
    sent: tuple[SentEviction, ...] = ()
    evicted_at_ns: Mapping[str, int] = {}
    """Time of the latest victim, by plugin."""
    plugins: PluginStates = PluginStates()


def evaluate_evictions(
    inputs: EvictionInputs,
    state: EvictionState,
    config: EvictionConfig,
    external_findings: Iterable[EvictionFinding] = (),
) -> tuple[EvictionResult, EvictionState]:
    """Return the victims with their reasons, and the state for the next call.

    It may be called in every cycle: within interval_s of an evaluation its thresholds and conditions hold, without victims.
    """
    since = state.evaluated_at_ns
    if since is not None and 0 <= inputs.now_ns - since < config.interval_s * NS_PER_S:
        return msgspec.structs.replace(state.latest, victims=(), waiting=()), state
    if since is None or not 0 <= inputs.now_ns - since <= (config.interval_s + config.stale_s) * NS_PER_S:
        state = msgspec.structs.replace(state, plugins=_reset_plugins(state.plugins), met_since_ns={})
    uids = {pod.uid for pod in inputs.snapshot.pods}
    retained = tuple(each for each in state.sent if each.uid in uids and inputs.now_ns < each.until_ns)
    sent = tuple(each for each in retained if each.is_excluded(inputs))
    inputs = msgspec.structs.replace(inputs, stale_s=config.stale_s)
    findings, plugins = _evaluate_plugins(inputs, sent, state.plugins, config)
    findings += (_without_departed_pods(finding, inputs, sent) for finding in external_findings)
    thresholds, met_since = _with_durations(findings, state.met_since_ns, inputs.now_ns, config)
    proposals = [
        proposal
        for finding, threshold in zip(findings, thresholds, strict=True)
        for proposal in propose_evictions(finding, threshold, inputs.now_ns, state.evicted_at_ns, sent)
    ]
    victims, waiting = select_victims(proposals, config, inputs.stuck)
    # A dry-run victim is reported once, and is not replaced: in a real run it would be gone by now.
    notified = {(each.uid, each.plugin) for each in sent if each.dry_run}
    victims = tuple(each for each in victims if not each.dry_run or (each.uid, each.plugin) not in notified)
    conditions = _conditions(thresholds, state.conditions, inputs.now_ns, config)
    evictions = EvictionResult(
        thresholds=thresholds, conditions=tuple(conditions.values()), victims=victims, waiting=waiting
    )
    evicted = [victim for victim in victims if not victim.notify]
    return evictions, EvictionState(
        evaluated_at_ns=inputs.now_ns,
        latest=evictions,
        met_since_ns=met_since,
        conditions=conditions,
        sent=(*retained, *(_sent_eviction(victim, inputs) for victim in evicted)),
        evicted_at_ns={**state.evicted_at_ns, **{victim.plugin: inputs.now_ns for victim in evicted}},
        plugins=plugins,
    )


def _evaluate_plugins(
    inputs: EvictionInputs, sent: Iterable[SentEviction], states: PluginStates, config: EvictionConfig
) -> tuple[list[EvictionFinding], PluginStates]:
    """Evaluate every enabled plugin in Katalyst's order; none on an old snapshot or an old list of pods.

    Dry-run victims still run, and count as running.
    """
    enabled = [name for name in PLUGIN_NAMES if config.enabled(name)]
    if what := inputs.unknown:
        return [missing_input_finding(name, what) for name in enabled], _reset_plugins(states)
    terminating = inputs.terminating | {each.pod for each in sent if not each.dry_run}
    inputs = msgspec.structs.replace(inputs, terminating=terminating)
    findings: list[EvictionFinding] = []
    retained: dict[str, object] = {}
    for name in enabled:
        plugin = _PLUGINS[name]
        try:
            arguments = [getattr(states, plugin.state)] if plugin.state else []
            arguments += [getattr(config, plugin.config)] if plugin.config else []
            result = plugin.evaluate(inputs, *arguments)
            if plugin.state:
                result, retained[plugin.state] = result
            findings += result
        except Exception as failure:  # noqa: BLE001 - the failure is reported, and the others go on
            text = f"This plugin failed: {type(failure).__name__}: {failure}"
            findings.append(not_met_finding(name, PLUGIN_FAILED, text))
            if plugin.state:
                retained[plugin.state] = getattr(_reset_plugins(states), plugin.state)
    return findings, PluginStates(**retained)  # type: ignore[arg-type]


def _without_departed_pods(
    finding: EvictionFinding, inputs: EvictionInputs, sent: Iterable[SentEviction]
) -> EvictionFinding:
    """Return the finding of an external plugin without the pods that have terminated or are terminating since."""
    if what := inputs.unknown:
        return missing_input_finding(finding.threshold.plugin, what)
    excluded = {each.pod for each in sent if not each.dry_run}
    running = {pod.uid: pod for pod in inputs.running_pods if pod.key not in excluded}
    candidates = tuple(
        msgspec.structs.replace(each, pod=running[each.pod.uid])
        for each in finding.candidates
        if each.pod.uid in running
    )
    return msgspec.structs.replace(finding, candidates=candidates)


def _reset_plugins(states: PluginStates) -> PluginStates:
    """Return the states after a time without inputs: counters and timers start again.

    The victims of a power response stay, or the same response would select as many again.
    """
    return PluginStates(power=states.power)


class _Plugin(NamedTuple):
    """One plugin: its function, the setting that it takes, and its field of PluginStates; empty if it has neither."""

    evaluate: Callable[..., Any]
    """Takes the inputs, its state and its settings; returns its findings, and with a state also the new one."""
    config: str
    state: str = ""


_PLUGINS: Mapping[str, _Plugin] = {
    reclaimed_resource_pressure.NAME: _Plugin(reclaimed_resource_pressure.evaluate_reclaimed, "reclaimed"),
    reclaimed_numa_resource_pressure.NAME: _Plugin(
        reclaimed_numa_resource_pressure.evaluate_reclaimed_numa, "reclaimed"
    ),
    numa_memory_pressure.NAME: _Plugin(numa_memory_pressure.evaluate_numa_memory, "numa_memory", "numa_memory"),
    system_memory_pressure.NAME: _Plugin(
        system_memory_pressure.evaluate_system_memory, "system_memory", "system_memory"
    ),
    rss_overuse.NAME: _Plugin(rss_overuse.evaluate_rss_overuse, "rss"),
    rootfs_pressure.NAME: _Plugin(rootfs_pressure.evaluate_rootfs_pressure, "rootfs_pressure"),
    rootfs_overuse.NAME: _Plugin(rootfs_overuse.evaluate_rootfs_overuse, "rootfs_overuse"),
    network_eviction.NAME: _Plugin(network_eviction.evaluate_network, "network", "network"),
    cpu_pressure_load.NAME: _Plugin(cpu_pressure_load.evaluate_cpu_load, "load", "load"),
    cpu_pressure_suppression.NAME: _Plugin(
        cpu_pressure_suppression.evaluate_cpu_suppression, "suppression", "suppression"
    ),
    numa_cpu_pressure.NAME: _Plugin(numa_cpu_pressure.evaluate_numa_cpu, "numa_cpu", "numa_cpu"),
    numa_sys_cpu_pressure.NAME: _Plugin(numa_sys_cpu_pressure.evaluate_numa_sys_cpu, "numa_sys", "numa_sys"),
    koordinator_cpu_evict.NAME: _Plugin(
        koordinator_cpu_evict.evaluate_koordinator_cpu, "koordinator_cpu", "koordinator_cpu"
    ),
    koordinator_memory_evict.NAME: _Plugin(koordinator_memory_evict.evaluate_koordinator_memory, "koordinator_memory"),
    oomd_pressure.NAME: _Plugin(oomd_pressure.evaluate_oomd, "oomd", "oomd"),
    node_power_pressure.NAME: _Plugin(node_power_pressure.evaluate_node_power, "", "power"),
}


def _with_durations(
    findings: Iterable[EvictionFinding], before: Mapping[str, int], now_ns: int, config: EvictionConfig
) -> tuple[tuple[EvictionThreshold, ...], dict[str, int]]:
    """Return the thresholds with the time since when they are met without a break. A hard threshold is also a soft one."""
    thresholds, since = [], {}
    for finding in findings:
        threshold = finding.threshold
        since_ns = None
        if threshold.met is not ThresholdMet.NOT_MET:
            for met in (
                (ThresholdMet.SOFT, ThresholdMet.HARD) if threshold.met is ThresholdMet.HARD else (ThresholdMet.SOFT,)
            ):
                key = f"{threshold.plugin}|{threshold.scope}|{threshold.subject}|{met}"
                since_ns = since[key] = before.get(key, now_ns)
        dry_run = config.dry(threshold.plugin)
        thresholds.append(msgspec.structs.replace(threshold, since_ns=since_ns, dry_run=dry_run))
    return tuple(thresholds), since


def _sent_eviction(victim: EvictionVictim, inputs: EvictionInputs) -> SentEviction:
    until_ns = inputs.now_ns + exclusion_ns(victim, inputs.snapshot.pods)
    held_until_ns = min(until_ns, inputs.now_ns + termination_wait_ns(DEFAULT_GRACE_S))
    return SentEviction(
        pod=victim.pod, uid=victim.uid, plugin=victim.plugin, until_ns=until_ns, held_until_ns=held_until_ns,
        dry_run=victim.dry_run,
    )  # fmt: skip


def _conditions(
    thresholds: Iterable[EvictionThreshold], before: Mapping[str, ActiveCondition], now_ns: int, config: EvictionConfig
) -> dict[str, ActiveCondition]:
    """Return the conditions that are met now or were within condition_s, without those of dry runs and disabled plugins.

    An external plugin that is not there may come back, so its condition stays for condition_s.
    """
    retained = {
        name: shown
        for name, shown in before.items()
        if 0 <= now_ns - shown.last_met_ns <= config.condition_s * NS_PER_S
        and not config.dry(shown.plugin)
        and (shown.plugin not in PLUGIN_NAMES or config.enabled(shown.plugin))
    }
    for threshold in thresholds:
        condition = threshold.condition
        if condition is None or threshold.dry_run:
            continue
        since = retained[condition.name].since_ns if condition.name in retained else now_ns
        retained[condition.name] = ActiveCondition(
            condition=condition,
            plugin=threshold.plugin,
            since_ns=since,
            last_met_ns=now_ns,
            ends_ns=now_ns + round(config.condition_s * NS_PER_S),
        )
    return retained
