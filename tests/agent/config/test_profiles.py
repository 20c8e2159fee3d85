"""Profiles are valid settings, and single settings override them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cli.agent
from agent.__main__ import AgentOptions
from agent.config.config import AgentConfig
from agent.config.loader import ConfigError, load_documents
from agent.config.profiles import COLOCATE, KATALYST, OBSERVE, PROFILES, profile_rows, with_defaults
from agent.dynamic_config.effective import effective_configuration
from agent.dynamic_config.merge import ResolvedConfig
from api.decision import ActMode
from api.diagnostics import EffectiveSetting

ANY_LEVEL = {
    "numa-memory-pressure-eviction-plugin",
    "system-memory-pressure-eviction-plugin",
    "rss-overuse-eviction-plugin",
    "rootfs-pressure-eviction-plugin",
    "rootfs-overuse-eviction-plugin",
    "network-eviction-plugin",
    "cpu-pressure-load-plugin",
    "numa-cpu-pressure-plugin",
    "numa-sys-cpu-pressure-plugin",
    "koordinator-memory-evict",
    "*",
}
"""Plugins that may select pods of any QoS level."""


def load(profile: str, path: Path | None = None) -> AgentConfig:
    return load_documents(path, (), profile)[1]


def test_observe_is_the_default_settings_without_writes() -> None:
    assert load(OBSERVE) == AgentConfig()
    assert PROFILES[OBSERVE].act is ActMode.DRY_RUN


def test_colocate_publishes_and_evicts_reclaimed_pods_only() -> None:
    config = load(COLOCATE)
    assert config.report.extended_resources
    assert config.eviction.plugins
    assert not ANY_LEVEL & set(config.eviction.plugins)
    assert config.advisor == AgentConfig().advisor
    assert PROFILES[COLOCATE].act is ActMode.ON


def test_katalyst_is_its_pools_periods_and_evictions() -> None:
    config = load(KATALYST)
    assert (config.advisor.policy, config.interval_s, config.eviction.plugins) == ("canonical", 5.0, ("*",))
    # Headroom reporter and eviction manager: katalyst-core's defaults are this agent's too.
    assert (config.report.period_s, config.report.window_s, config.eviction.interval_s) == (30.0, 120.0, 5.0)


@pytest.mark.parametrize("profile", PROFILES)
def test_no_profile_repeats_a_default(profile: str) -> None:
    config, default = load(profile), AgentConfig()
    shown = effective_configuration(ResolvedConfig(config, {}, {}, {}, {}), {}, 0).settings
    plain = effective_configuration(ResolvedConfig(default, {}, {}, {}, {}), {}, 0).settings
    changed = {mine.name for mine, base in zip(shown, plain, strict=True) if mine.value != base.value}
    index = tuple(PROFILES).index(profile)
    assert changed == {path for path, values in profile_rows() if values[index] != ""}


@pytest.mark.parametrize(
    ("document", "merged"),
    [
        ({}, {"a": {"b": 1, "c": [2]}, "d": 3}),
        ({"a": {"c": []}}, {"a": {"b": 1, "c": []}, "d": 3}),
        ({"a": {"b": None, "e": 4}}, {"a": {"b": None, "e": 4, "c": [2]}, "d": 3}),
        ({"a": 5}, {"a": 5, "d": 3}),
        ([1], [1]),
    ],
)
def test_what_the_document_sets_overrides_the_defaults(document: Any, merged: Any) -> None:
    defaults: Mapping[str, Any] = {"a": {"b": 1, "c": [2]}, "d": 3}
    assert with_defaults(document, defaults) == merged
    assert defaults == {"a": {"b": 1, "c": [2]}, "d": 3}


def test_a_single_setting_of_the_file_overrides_the_profile(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("report: {extendedResources: false, reservedCores: 1}\nmemory: {reclaimRoot: /batch}\n")
    documents, config = load_documents(file, (), COLOCATE)
    assert not config.report.extended_resources
    assert config.eviction.plugins == load(COLOCATE).eviction.plugins
    effective = effective_configuration(ResolvedConfig(config, {}, {}, {}, {}), documents, 7)
    settings: dict[str, EffectiveSetting] = {setting.name: setting for setting in effective.settings}
    sources = {
        name: (settings[name].source, settings[name].since_wall_ns)
        for name in ("report.extendedResources", "report.reservedCores", "eviction.plugins", "intervalS")
    }
    assert sources == {
        "report.extendedResources": ("file", 7),
        "report.reservedCores": ("file", 7),
        "eviction.plugins": ("profile colocate", 7),
        "intervalS": ("default", None),
    }


def test_a_file_that_contradicts_its_profile_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("advisor: {latency: {staleS: 2}}\n")
    assert load(COLOCATE, file).advisor.latency.stale_s == 2
    with pytest.raises(ConfigError, match=r"advisor\.latency\.staleS: 2 is less than intervalS, 5"):
        load(KATALYST, file)


@pytest.mark.parametrize(
    ("words", "act"),
    [
        ((), "off"),
        (("--kubelet",), "dry-run"),
        (("--kubelet", "--profile", "colocate"), "on"),
        (("--kubelet", "--profile", "katalyst", "--act", "dry-run"), "dry-run"),
        (("--profile", "katalyst", "--act", "off"), "off"),
    ],
)
def test_the_mode_is_that_of_the_profile(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], act: str) -> None:
    started: list[AgentOptions] = []

    def start(options: AgentOptions) -> int:
        started.append(options)
        return 0

    monkeypatch.setattr(cli.agent, "main", start)
    assert CliRunner().invoke(cli.agent.agent, words).exit_code == 0
    assert [options.act.value for options in started] == [act]
    assert started[0].profile == (words[words.index("--profile") + 1] if "--profile" in words else OBSERVE)


def test_a_profile_that_acts_needs_pods() -> None:
    result = CliRunner().invoke(cli.agent.agent, ("--profile", "colocate"))
    assert (result.exit_code, "--profile colocate needs --pods or --kubelet" in result.output) == (2, True)
