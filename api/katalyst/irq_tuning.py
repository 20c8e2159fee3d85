"""IRQTuningConfiguration: which CPUs serve the interrupts of network cards.
Utilization and core fractions are in percent, intervals in seconds, rates in packets per second.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from api.katalyst.kcc import ConfigResource, GenericConfigSpec
from api.katalyst.meta import Int64, KatalystStruct, Percent, Positive, schema_default, schema_keywords

PacketRate = Annotated[int, Meta(ge=0), schema_keywords(format="uint64")]
OneOrTwo = Literal[1, 2]


class RPSExcludeIRQCoresThreshold(KatalystStruct, frozen=True, kw_only=True):
    """From when on packets are not steered to the cores that serve interrupts."""

    rps_cores_vs_irq_cores_ratio: float | None = field(default=None, name="rpsCoresVSIRQCoresRatio")
    """So many other cores for each of them."""


class ThroughputThresholds(KatalystStruct, frozen=True, kw_only=True):
    """A rate, and how often in a row it has to be passed."""

    rx_pps_threshold: Int64 | None = field(default=None, name="rxPPSThreshold")
    successive_count: int | None = None


class ThroughputClassSwitch(KatalystStruct, frozen=True, kw_only=True):
    """When a card changes between low and normal throughput."""

    low_throughput_thresholds: ThroughputThresholds | None = None
    normal_throughput_thresholds: ThroughputThresholds | None = None


class CoreNetOverLoadThreshold(KatalystStruct, frozen=True, kw_only=True):
    """When a core that serves interrupts has too many packets."""

    soft_net_time_squeeze_ratio: float | None = None
    """Of the packets, how many were left for the next turn."""


class CoresExclusionRate(KatalystStruct, frozen=True, kw_only=True):
    """A rate, and how often in a row it has to be passed."""

    rx_pps_threshold: PacketRate | None = field(default=None, name="rxPPSThreshold")
    successive_count: int | None = None


class CoresExclusionThresholds(KatalystStruct, frozen=True, kw_only=True):
    """When a card's cores begin and cease to serve nothing else."""

    enable_thresholds: CoresExclusionRate | None = None
    disable_thresholds: CoresExclusionRate | None = None


class CoresExclusion(KatalystStruct, frozen=True, kw_only=True):
    """Cores that serve interrupts alone."""

    thresholds: CoresExclusionThresholds | None = None
    successive_switch_interval: float | None = None
    """Between two changes, at least."""


class LoadBalanceThresholds(KatalystStruct, frozen=True, kw_only=True):
    """When interrupts move to another core."""

    cpu_util_threshold: int | None = None
    cpu_util_gap_threshold: int | None = None
    """By how much less busy the other one has to be."""


class LoadBalance(KatalystStruct, frozen=True, kw_only=True):
    """Moving interrupts from busy cores to others."""

    successive_tuning_interval: int | None = None
    """Between two moves, at least."""
    ping_pong_interval_threshold: int | None = None
    """There and back within this is ping-pong."""
    ping_pong_count_threshold: int | None = None
    """So much of it adds cores."""
    irq_tuned_num_max_each_time: OneOrTwo | None = None
    """Interrupts that move at once."""
    irq_cores_tuned_num_max_each_time: OneOrTwo | None = None
    """Cores whose interrupts move at once."""
    thresholds: LoadBalanceThresholds | None = None


class CoresAdjustThresholds(KatalystStruct, frozen=True, kw_only=True):
    """The average utilization that is compared with."""

    avg_cpu_util_threshold: int | None = field(default=None, name="avgCPUUtilThreshold")


class CoresIncrease(KatalystStruct, frozen=True, kw_only=True):
    """When more cores serve interrupts."""

    successive_inc_interval: Positive | None = None
    """Between two steps, at least."""
    full_threshold: int | None = None
    """As busy as this, all cores serve them at once."""
    thresholds: CoresAdjustThresholds | None = None


class CoresDecrease(KatalystStruct, frozen=True, kw_only=True):
    """When fewer cores serve interrupts."""

    successive_dec_interval: int | None = None
    """Between two steps, at least."""
    ping_pong_adjust_interval: int | None = None
    """After a step up, at least."""
    since_last_balance_interval: int | None = None
    """After interrupts moved, at least."""
    dec_cores_max_each_time: int | None = None
    thresholds: CoresAdjustThresholds | None = None


class CoresAdjust(KatalystStruct, frozen=True, kw_only=True):
    """How many cores serve interrupts, in percent of all."""

    percent_min: Percent | None = None
    percent_max: Percent | None = None
    inc_conf: CoresIncrease | None = None
    dec_conf: CoresDecrease | None = None


class IRQTuningConfig(KatalystStruct, frozen=True, kw_only=True):
    """Which CPUs serve the interrupts of network cards, and when that changes."""

    enable_tuner: bool | None = None
    tuning_policy: Annotated[str, schema_default("balance")] | None = None
    """Balance, Exclusive or Auto."""
    tuning_interval: Annotated[int, schema_default(5)] | None = None
    enable_rps: bool | None = field(default=None, name="enableRPS")
    """Steer packets to further cores; only with the policy Balance."""
    enable_rps_cpu_vs_nics_queue: float | None = field(default=None, name="enableRPSCPUVSNicsQueue")
    """Do that where there are more CPUs than so many for each queue of the cards."""
    disable_xps: bool | None = field(default=None, name="disableXPS")
    nic_affinity_policy: str | None = None
    """CompleteMap, OverallBalance or PhysicalTopo."""
    normal_throughput_nics: tuple[str, ...] | None = None
    """Cards that count as busy whatever they receive."""
    cores_expected_cpu_util: Percent | None = field(default=None, name="coresExpectedCPUUtil")
    rps_exclude_irq_cores_threshold: RPSExcludeIRQCoresThreshold | None = field(
        default=None, name="rpsExcludeIRQCoresThreshold"
    )
    throughput_class_switch: ThroughputClassSwitch | None = None
    core_net_over_load_threshold: CoreNetOverLoadThreshold | None = None
    renice_ksoftirqd: bool | None = None
    ksoftirqd_nice: int | None = None
    cores_exclusion: CoresExclusion | None = None
    load_balance: LoadBalance | None = None
    cores_adjust: CoresAdjust | None = None


class IRQTuningConfigurationSpec(GenericConfigSpec, frozen=True, kw_only=True):
    """Which nodes tune interrupts, and how."""

    config: IRQTuningConfig


class IRQTuningConfiguration(ConfigResource, frozen=True, kw_only=True):
    """How nodes tune the interrupts of their network cards."""

    spec: IRQTuningConfigurationSpec | None = None
