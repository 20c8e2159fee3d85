"""Settings: defaults, and refusals that name file, field and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import AdvisorConfig, Config, ConfigError, load, parse


def test_an_empty_file_is_the_defaults() -> None:
    assert parse(b"", "f") == Config()
    assert load(None) == Config()


def test_fields_are_camel_case() -> None:
    config = parse(b"advisor: {policy: canonical, latency: {targetWaitMs: 5}}", "f")
    assert (config.advisor.policy, config.advisor.latency.target_wait_ms) == ("canonical", 5.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("advisor: {latency: {targetWaitMs: 0}}", "f.yaml: advisor.latency.targetWaitMs: Expected `float` >= 0.002"),
        ("advisor: {polcy: latency}", "f.yaml: advisor: Object contains unknown field `polcy`"),
        ("advisor: {policy: best}", "f.yaml: advisor.policy: Invalid enum value 'best'"),
        ("intervalS: soon", "f.yaml: intervalS: Expected `float`, got `str`"),
        ("[]", "f.yaml: top level: Expected `object`, got `array`"),
        ("a: [", "f.yaml: not YAML"),
        ("[" * 5000, "f.yaml: n"),
        ("&a {advisor: *a}", "f.yaml: advisor: Object contains unknown field `advisor`"),
        ("interval" + chr(0), "f.yaml: not YAML"),
    ],
)
def test_what_cannot_hold_is_refused_with_file_and_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text.encode(), "f.yaml")
    assert message in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "none.yaml")


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_means_something(text: bytes) -> None:
    try:
        config = parse(text, "f")
    except ConfigError as error:
        message = str(error)
    else:
        message = f"f: {config.interval_s}"
    assert message.startswith("f: ")


@pytest.mark.parametrize(("cpus", "reserve", "reclaim"), [(48, 4, 4), (16, 4, 4), (8, 2, 2), (2, 0.5, 1), (1, 0.25, 1)])
def test_small_nodes_reserve_a_quarter(cpus: int, reserve: float, reclaim: int) -> None:
    assert AdvisorConfig().reserve_cores(cpus) == reserve
    assert AdvisorConfig().reclaim_reserve_cores(cpus, 1) == reclaim


def test_what_is_configured_holds_on_small_nodes_too() -> None:
    config = AdvisorConfig(reserved_for_allocate_cores=4, min_reclaimed_cores=16)
    assert config.reserve_cores(2) == 2
    assert config.reclaim_reserve_cores(16, 2) == 16
