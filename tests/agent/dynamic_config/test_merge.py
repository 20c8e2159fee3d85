"""Precedence, the last good object, what is on disk, and what `dioptase config` prints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.config import AgentConfig
from agent.config.eviction import DEFAULT_PLUGINS
from agent.config.loader import build_config
from agent.dynamic_config.effective import effective_configuration
from agent.dynamic_config.follow import DynamicConfig
from agent.dynamic_config.last_good import LAYOUT_VERSION, LastGoodDocument, LastGoodFile
from agent.dynamic_config.merge import ConfigObject, ResolvedConfig, resolve_config
from api.diagnostics import EffectiveSetting
from cli.config import config_lines
from common.state_file import StateFileDamaged, decode_state, encode_state
from tests.agent.dynamic_config.test_translate import nested

ADMIN, TMO, GROUPS = "adminqosconfigurations", "transparentmemoryoffloadingconfigurations", "strategygroups"
NUMA, SYSTEM = "numa-memory-pressure-eviction-plugin", "system-memory-pressure-eviction-plugin"
RSS = "rss-overuse-eviction-plugin"


def fits(_: AgentConfig) -> str:
    return ""


def thing(config: Any, content: str = "h1", resource: str = ADMIN, since: int = 1) -> ConfigObject:
    body = {"status": config} if resource == GROUPS else {"spec": {"config": config}}
    return ConfigObject(resource=resource, key="kube-system/all", hash=content, since_wall_ns=since, body=body)


def settled(
    document: Mapping[str, Any], *objects: ConfigObject, before: Mapping[str, ConfigObject] | None = None
) -> ResolvedConfig:
    return resolve_config(build_config(document, "f"), before or {}, {item.resource: item for item in objects}, fits)


def reclaim(**fields: Any) -> dict[str, Any]:
    return {"reclaimedResourceConfig": fields}


def test_objects_override_the_file_and_the_file_the_defaults() -> None:
    file = {"advisor": {"enableReclaim": True, "minShareCores": 6}, "report": {"reservedCores": 2}}
    result = settled(file, thing(reclaim(enableReclaim=False)))
    advisor = result.config.advisor
    assert (advisor.enable_reclaim, advisor.min_share_cores, result.config.report.reserved_cores) == (False, 6, 2.0)
    assert advisor.min_ramp_down_period_s == 30.0


def test_without_objects_the_settings_are_the_files() -> None:
    config = build_config({"advisor": {"policy": "canonical"}}, "f")
    assert resolve_config(config, {}, {}, fits).config is config


def test_maps_are_merged_by_key_and_lists_replaced() -> None:
    file = {
        "advisor": {"provision": {"disableReclaimSharePools": ["a"], "targets": {"share": {"cpu_usage_ratio": 0.7}}}}
    }
    regions = [{"regionType": "share", "targets": [{"name": "cpu_sched_wait", "target": 200}]}]
    config = {
        **reclaim(disableReclaimSharePools=["b"]),
        "advisorConfig": {"cpuAdvisorConfig": {"cpuProvisionConfig": {"regionIndicators": regions}}},
    }
    provision = settled(file, thing(config)).config.advisor.provision
    assert provision.disable_reclaim_share_pools == ("b",)
    assert provision.targets.share == {"cpu_usage_ratio": 0.7, "cpu_sched_wait": 200.0}


@pytest.mark.parametrize(
    ("file", "enable", "plugins"),
    [
        ([], {"enableNumaLevelEviction": True}, (NUMA,)),
        (["*"], {"enableNumaLevelEviction": False}, tuple(name for name in DEFAULT_PLUGINS if name != NUMA)),
        ([RSS], {"enableSystemLevelEviction": True, "enableNumaLevelEviction": False}, (SYSTEM, RSS)),
        (["*"], {"enableRSSOveruseEviction": True}, (*DEFAULT_PLUGINS, RSS)),
    ],
)
def test_plugins_are_switched_one_by_one(file: list[str], enable: Any, plugins: tuple[str, ...]) -> None:
    config = {"evictionConfig": {"memoryPressureEvictionConfig": enable}}
    assert set(settled({"eviction": {"plugins": file}}, thing(config)).config.eviction.plugins) == set(plugins)


def test_a_dry_run_of_a_disabled_plugin_is_accepted() -> None:
    result = settled({"eviction": {"plugins": [RSS]}}, thing({"evictionConfig": {"dryRun": [RSS, NUMA]}}))
    assert (result.config.eviction.dry_run, result.problems) == ((RSS,), {})


def test_a_strategy_and_an_object_that_say_different_things_of_a_plugin_do_not_hide_the_rest() -> None:
    admin = thing(
        nested("evictionConfig.cpuPressureEvictionConfig.numaCPUPressureEvictionConfig.enableEviction", value=False)
    )
    group = thing({"enabledStrategies": [{"name": "numa_cpu_pressure_eviction"}]}, resource=GROUPS)
    assert settled({}, admin, group).config.eviction.plugins == ("numa-cpu-pressure-plugin",)


BAD = [
    (reclaim(enableReclaim=3), "spec.config.reclaimedResourceConfig.enableReclaim: Expected `bool"),
    (
        reclaim(numaMinReclaimedResourceRatioForAllocate={"cpu": "2"}),
        "numaMinReclaimedResourceRatioForAllocate.cpu: as the setting advisor.provision.numaMinReclaimedRatio",
    ),
    (
        reclaim(
            cpuHeadroomConfig={
                "utilBasedConfig": {"targetReclaimedCoreUtilization": 0.8, "maxReclaimedCoreUtilization": 0.5}
            }
        ),
        "as the setting advisor.headroom.util: maximum 0.5 is below target 0.8",
    ),
]


@pytest.mark.parametrize(("config", "message"), BAD)
def test_a_bad_object_leaves_the_last_good_one_in_force(config: Any, message: str) -> None:
    good = thing(reclaim(enableReclaim=False))
    bad = thing({**config, "evictionConfig": {"dryRun": ["*"]}}, "h2")
    result = settled({}, bad, before={ADMIN: good})
    assert message in result.problems[ADMIN]
    rules = DynamicConfig({}, AgentConfig(), fits, None)
    rules.change({ADMIN: good})
    rules.change({ADMIN: bad})
    assert rules.object_states() == {
        ("AdminQoSConfiguration", "kube-system/all", "h1"): True,
        ("AdminQoSConfiguration", "kube-system/all", "h2"): False,
    }
    assert result.applied == {ADMIN: good}
    assert (result.config.advisor.enable_reclaim, result.config.eviction.dry_run) == (False, ())


def test_a_bad_first_object_leaves_the_file() -> None:
    result = settled({"advisor": {"minShareCores": 6}}, thing(reclaim(enableReclaim=3)))
    assert (result.config.advisor.min_share_cores, dict(result.applied)) == (6, {})


def test_an_object_that_this_node_cannot_hold_is_refused_by_its_field() -> None:
    def small(config: AgentConfig) -> str:
        expected = config.advisor.min_reclaimed_cores
        return (
            f"advisor.minReclaimedCores: {expected} is more than the 4 CPUs of this node; lower it" if expected else ""
        )

    expected = thing(reclaim(minReclaimedResourceForAllocate={"cpu": "64"}))
    result = resolve_config(AgentConfig(), {}, {ADMIN: expected}, small)
    assert result.problems[ADMIN] == (
        "spec.config.reclaimedResourceConfig.minReclaimedResourceForAllocate.cpu: as the setting "
        "advisor.minReclaimedCores: 64 is more than the 4 CPUs of this node; lower it"
    )


def test_an_object_that_is_no_longer_desired_is_no_longer_applied() -> None:
    good = thing(reclaim(enableReclaim=False))
    assert resolve_config(AgentConfig(), {ADMIN: good}, {}, fits).config.advisor.enable_reclaim is True


def test_one_bad_kind_does_not_keep_the_others_back() -> None:
    layer = {"qosLevelConfig": [{"qosLevel": "shared_cores", "configDetail": {"enableTMO": True}}]}
    result = settled({}, thing(reclaim(enableReclaim=3)), thing(layer, resource=TMO))
    assert list(result.applied) == [TMO]
    assert list(result.problems) == [ADMIN]
    assert [each.enable for each in result.config.memory.offloading.levels.values()] == [True]


def of(settings: tuple[EffectiveSetting, ...], name: str) -> EffectiveSetting:
    return next(item for item in settings if item.name == name)


def test_every_value_says_where_it_came_from() -> None:
    file = {"advisor": {"minShareCores": 6, "enableReclaim": True}, "eviction": {"plugins": ["*"]}}
    config = {
        **reclaim(enableReclaim=False),
        "evictionConfig": {
            "memoryPressureEvictionConfig": {"enableRSSOveruseEviction": True},
            "cpuPressureEvictionConfig": {"numaSysCPUPressureEvictionConfig": {"gracePeriod": -1}},
        },
    }
    reported = effective_configuration(settled(file, thing(config, since=7)), {"file": file}, 5)
    assert len(reported.settings) == len({item.name for item in reported.settings}) > 250
    assert of(reported.settings, "advisor.minShareCores") == EffectiveSetting(
        name="advisor.minShareCores", value="6", source="file", since_wall_ns=5
    )
    assert of(reported.settings, "intervalS") == EffectiveSetting(name="intervalS", value="1", source="default")
    assert of(reported.settings, "advisor.enableReclaim") == EffectiveSetting(
        name="advisor.enableReclaim",
        value="false",
        source="AdminQoSConfiguration",
        object="kube-system/all",
        hash="h1",
        field="spec.config.reclaimedResourceConfig.enableReclaim",
        since_wall_ns=7,
    )
    plugins = of(reported.settings, "eviction.plugins")
    assert plugins.source == "AdminQoSConfiguration"
    assert RSS in plugins.value
    # A grace below zero is the pod's own, which is what is unset.
    grace = of(reported.settings, "eviction.numaSys.graceS")
    assert grace.value == "unset"
    assert grace.field.endswith("numaSysCPUPressureEvictionConfig.gracePeriod")


def test_what_the_terminal_shows() -> None:
    good, bad = thing(reclaim(enableReclaim=False)), thing(reclaim(enableReclaim=3), "h2")
    layer = thing({"qosLevelConfig": []}, resource=TMO)
    result = resolve_config(AgentConfig(), {ADMIN: good}, {ADMIN: bad, TMO: layer}, fits)
    reported = msgspec.structs.replace(effective_configuration(result, {}, 5, {ADMIN: bad, TMO: layer}), node="n1")
    shown = list(config_lines(reported, (), 2_000_000_000))
    assert shown[0].split() == ["intervalS", "1", "(default)"]
    assert sum(line.startswith("advisor.enableReclaim ") and "kube-system/all h1" in line for line in shown) == 1
    assert "node n1: its CustomNodeConfig is watched" in shown
    refused = [line for line in shown if "cannot be applied" in line]
    assert len(refused) == 1
    assert refused[0].startswith("AdminQoSConfiguration kube-system/all h2 cannot be applied: spec.config.")
    only = list(config_lines(reported, ("report",), 0))
    assert {line.partition(".")[0] for line in only} == {"report"}


def test_applied_objects_are_applied_again_after_a_restart(tmp_path: Path) -> None:
    rules = DynamicConfig({}, AgentConfig(), fits, LastGoodFile(tmp_path, "n1"))
    rules.change({ADMIN: thing(reclaim(enableReclaim=False))})
    rules.save()
    again = DynamicConfig({}, AgentConfig(), fits, LastGoodFile(tmp_path, "n1"))
    assert again.config.advisor.enable_reclaim is False
    assert again.resolved.applied == rules.resolved.applied
    other = DynamicConfig({}, AgentConfig(), fits, LastGoodFile(tmp_path, "n2"))
    assert other.config == AgentConfig()
    assert "is of node n1, not of n2" in other.messages[0]


def test_a_damaged_file_is_set_aside_and_said(tmp_path: Path) -> None:
    file = LastGoodFile(tmp_path, "n1")
    file.save({ADMIN: thing(reclaim(enableReclaim=False))})
    file.path.write_bytes(file.path.read_bytes().replace(b"false", b"true"))
    assert file.load() == {}
    assert "was damaged: its checksum does not match" in file.messages[0]
    assert (tmp_path / "dynamic_config.damaged-1").exists()


def test_a_file_that_does_not_fit_a_new_settings_file_goes_as_far_as_it_does(tmp_path: Path) -> None:
    ratio = thing(reclaim(cpuHeadroomConfig={"utilBasedConfig": {"maxReclaimedCoreUtilization": 0.7}}))
    layer = thing({"qosLevelConfig": [{"qosLevel": "shared_cores", "configDetail": {"enableTMO": True}}]}, resource=TMO)
    LastGoodFile(tmp_path, "n1").save({ADMIN: ratio, TMO: layer})
    file = {"advisor": {"headroom": {"util": {"target": 0.8}}}}
    rules = DynamicConfig({"file": file}, build_config(file, "f"), fits, LastGoodFile(tmp_path, "n1"))
    assert list(rules.resolved.applied) == [TMO]
    assert "maximum 0.7 is below target 0.8" in rules.resolved.problems[ADMIN]


@given(st.binary(max_size=200))
def test_no_content_of_the_file_breaks_the_reader(data: bytes) -> None:
    complete = encode_state(LastGoodDocument(node="n", objects=(thing(reclaim(enableReclaim=True)),)))
    assert decode_state(complete, LastGoodDocument, LAYOUT_VERSION).node == "n"
    for text in (data, complete[: len(data)] + data):
        if text != complete:
            with pytest.raises(StateFileDamaged):
                decode_state(text, LastGoodDocument, LAYOUT_VERSION)
