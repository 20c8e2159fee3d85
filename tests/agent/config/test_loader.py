"""The settings file: defaults, and errors that name file, field and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.config import AgentConfig
from agent.config.loader import ConfigError
from tests.builders.settings import load_config, parse_config


def test_an_empty_file_is_the_defaults() -> None:
    assert parse_config(b"", "f") == AgentConfig()
    assert load_config(None, ()) == AgentConfig()


def test_fields_are_camel_case() -> None:
    config = parse_config(b"advisor: {policy: canonical, latency: {targetWaitMs: 5}}", "f")
    assert (config.advisor.policy, config.advisor.latency.target_wait_ms) == ("canonical", 5.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("advisor: {latency: {targetWaitMs: 0}}", "f.yaml: advisor.latency.targetWaitMs: Expected `float` >= 0.002"),
        ("advisor: {polcy: latency}", "f.yaml: advisor: Object contains unknown field `polcy`"),
        (
            "advisor: {policy: best}",
            "f.yaml: advisor.policy: Invalid enum value 'best', choose from latency, canonical, none; ",
        ),
        ("intervalS: soon", "f.yaml: intervalS: Expected `float`, got `str`"),
        ("[]", "f.yaml: top level: Expected `object`, got `array`"),
        ("a: [", "f.yaml: line 2: not YAML"),
        ("[" * 5000, "f.yaml: line 1: nested deeper than 32 levels"),
        ("&a {advisor: *a}", "f.yaml: line 1: anchors and aliases"),
        ("interval" + chr(0), "f.yaml: not YAML"),
        ("advisor: {policy: none, policy: canonical}", "f.yaml: line 1: key 'policy' occurs twice: remove one"),
        ("intervalS: 1\n---\nintervalS: 2", "f.yaml: line 2: a second document begins"),
        ("intervalS: 2026-13-45", "f.yaml: a value cannot be read: month must be in 1..12"),
        ("#" * (2 << 20), "f.yaml: larger than 1048576 bytes"),
        ("watchIntervalS: 2", "f.yaml: watchIntervalS: 2 is more than intervalS, 1: nothing would be watched; lower it"),
        ("intervalS: 12", "f.yaml: advisor.latency.staleS: 5 is less than intervalS, 12: waits would always be too old"),
        ("advisor: {latency: {minLentRatio: 1}}", "f.yaml: advisor.latency.minLentRatio: Expected `float` < 1.0"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_rejected_with_file_and_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text.encode(), "f.yaml")
    assert message in str(caught.value)


def test_probes_are_chosen_by_names_that_exist(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("probes: [sockets]")
    assert load_config(file, ("blockio", "sockets")).probes == ("sockets",)
    file.write_text("probes: []")
    assert load_config(file, ("blockio", "sockets")).probes == ()
    file.write_text("probes: [sockets, soket]")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ("blockio", "sockets"))
    assert str(caught.value) == f"{file}: probes: there is no probe `soket`; choose from blockio, sockets"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "none.yaml", ())


def test_a_long_interval_is_accepted_with_matching_settings() -> None:
    config = parse_config(b"{intervalS: 12, watchIntervalS: 12, advisor: {latency: {staleS: 12}}}", "f")
    assert (config.interval_s, config.watch_interval_s, config.advisor.latency.stale_s) == (12, 12, 12)


def test_bytes_that_are_not_utf8_are_rejected() -> None:
    with pytest.raises(ConfigError, match="f: not UTF-8 text at byte 1"):
        parse_config(b"a\xff", "f")


@given(st.binary(max_size=300))
def test_random_bytes_are_rejected_or_accepted_without_another_error(text: bytes) -> None:
    try:
        config = parse_config(text, "f")
    except ConfigError as error:
        message = str(error)
    else:
        message = f"f: {config.interval_s}"
    assert message.startswith("f: ")


def test_the_run_queue_probe_cannot_be_chosen(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("probes: [blockio, runqlat]")
    with pytest.raises(ConfigError, match="probes: `runqlat` always runs and cannot be chosen; remove it"):
        load_config(file, ("blockio",))
