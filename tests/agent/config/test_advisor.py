"""Defaults of advisor settings on nodes of every size."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agent.config.advisor import AdvisorConfig, ProvisionConfig


@pytest.mark.parametrize(("cpus", "reserve", "reclaim"), [(48, 4, 4), (16, 4, 4), (8, 2, 2), (2, 0.5, 1), (1, 0.25, 1)])
def test_small_nodes_reserve_a_quarter(cpus: int, reserve: float, reclaim: int) -> None:
    assert AdvisorConfig().reserve_cores(cpus) == reserve
    assert AdvisorConfig().reclaim_reserve_cores(cpus, 1) == reclaim


def test_configured_reserves_hold_on_small_nodes_too() -> None:
    config = AdvisorConfig(reserved_for_allocate_cores=4, min_reclaimed_cores=16)
    assert config.reserve_cores(2) == 2
    assert config.reclaim_reserve_cores(16, 2) == 16


def test_names_in_the_file_are_camel_case() -> None:
    config = msgspec.convert(
        {
            "sharePolicies": ["rama", "dynamic-quota"],
            "disableReclaimSharePools": ["batch"],
            "gains": {"cpi": {"up": 0.2, "down": 0.1, "deadAbove": 0.0, "deadBelow": 0.02}},
            "targets": {"share": {"cpu_sched_wait": 300}, "getters": {"cpi": "metric-threshold"}},
            "isolation": {"enabled": True, "lockOutS": 60},
        },
        ProvisionConfig,
    )
    assert config.share_policies == ("rama", "dynamic-quota")
    assert config.gains["cpi"].up == 0.2
    assert config.targets.share == {"cpu_sched_wait": 300.0}
    assert config.targets.dedicated == {"cpi": 1.4, "cpu_usage_ratio": 0.55}
    assert (config.isolation.enabled, config.isolation.lock_out_s, config.isolation.load_ratio) == (True, 60.0, 1.5)
    assert msgspec.convert(msgspec.to_builtins(config), ProvisionConfig) == config


def test_defaults_are_katalysts() -> None:
    config = msgspec.convert({}, ProvisionConfig)
    assert (config.share_policies, config.dedicated_policies) == (("canonical",), ("canonical",))
    assert config.restrict == {"rama": "dynamic-quota"}
    assert (config.overlap, config.quota, config.isolation.enabled) == (False, False, False)
    assert config.numa_min_reclaimed_ratio == 0
    isolation = config.isolation
    assert (isolation.load_cores, isolation.lock_in_rounds, isolation.lock_out_s) == (2.0, 3, 120.0)
    assert (isolation.max_resource_ratio, isolation.max_pod_ratio) == (0.2, 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sharePolicies": ["ramma"]}, "Invalid enum value 'ramma'"),
        ({"share_policies": ["rama"]}, "unknown field `share_policies`"),
        ({"numaMinReclaimedRatio": 1.5}, "<= 1.0"),
        ({"targets": {"share": {"cpu_usage_ratio": 0}}}, "> 0.0"),
        ({"gains": {"cpi": {"up": 0.1}}}, "missing required field `down`"),
        ({"isolation": {"lockInRounds": 0}}, ">= 1"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(settings, ProvisionConfig)
