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
    """When packets are no longer steered to the cores that serve interrupts (RPS)."""

    rps_cores_vs_irq_cores_ratio: float | None = field(default=None, name="rpsCoresVSIRQCoresRatio")
    """Minimum number of other cores for each of these cores."""


class ThroughputThresholds(KatalystStruct, frozen=True, kw_only=True):
    """Rate, and number of consecutive times that it has to be exceeded."""

    rx_pps_threshold: Int64 | None = field(default=None, name="rxPPSThreshold")
    successive_count: int | None = None


class ThroughputClassSwitch(KatalystStruct, frozen=True, kw_only=True):
    """When a network card changes between low and normal throughput."""

    low_throughput_thresholds: ThroughputThresholds | None = None
    normal_throughput_thresholds: ThroughputThresholds | None = None


class CoreNetOverLoadThreshold(KatalystStruct, frozen=True, kw_only=True):
    """When a core that serves interrupts is overloaded with packets."""

    soft_net_time_squeeze_ratio: float | None = None
    """Share of packets deferred to the next poll."""


class CoresExclusionRate(KatalystStruct, frozen=True, kw_only=True):
    """Rate, and number of consecutive times that it has to be exceeded."""

    rx_pps_threshold: PacketRate | None = field(default=None, name="rxPPSThreshold")
    successive_count: int | None = None


class CoresExclusionThresholds(KatalystStruct, frozen=True, kw_only=True):
    """When a card's interrupts get and lose exclusive cores."""

    enable_thresholds: CoresExclusionRate | None = None
    disable_thresholds: CoresExclusionRate | None = None


class CoresExclusion(KatalystStruct, frozen=True, kw_only=True):
    """Exclusive cores for interrupts."""

    thresholds: CoresExclusionThresholds | None = None
    successive_switch_interval: float | None = None
    """Minimum time between two changes."""


class LoadBalanceThresholds(KatalystStruct, frozen=True, kw_only=True):
    """When interrupts are moved to another core."""

    cpu_util_threshold: int | None = None
    cpu_util_gap_threshold: int | None = None
    """Minimum difference in utilization to the destination core."""


class LoadBalance(KatalystStruct, frozen=True, kw_only=True):
    """Moving interrupts from busy cores to others."""

    successive_tuning_interval: int | None = None
    """Minimum time between two moves."""
    ping_pong_interval_threshold: int | None = None
    """A move back within this time counts as ping-pong."""
    ping_pong_count_threshold: int | None = None
    """Number of ping-pong moves that adds cores."""
    irq_tuned_num_max_each_time: OneOrTwo | None = None
    """Maximum number of interrupts moved at once."""
    irq_cores_tuned_num_max_each_time: OneOrTwo | None = None
    """Maximum number of cores whose interrupts are moved at once."""
    thresholds: LoadBalanceThresholds | None = None


class CoresAdjustThresholds(KatalystStruct, frozen=True, kw_only=True):
    """Average utilization of the interrupt cores."""

    avg_cpu_util_threshold: int | None = field(default=None, name="avgCPUUtilThreshold")


class CoresIncrease(KatalystStruct, frozen=True, kw_only=True):
    """When to add cores for interrupts."""

    successive_inc_interval: Positive | None = None
    """Minimum time between two steps."""
    full_threshold: int | None = None
    """Utilization at which all cores serve interrupts at once."""
    thresholds: CoresAdjustThresholds | None = None


class CoresDecrease(KatalystStruct, frozen=True, kw_only=True):
    """When to remove cores from interrupts."""

    successive_dec_interval: int | None = None
    """Minimum time between two steps."""
    ping_pong_adjust_interval: int | None = None
    """Minimum time after an increase."""
    since_last_balance_interval: int | None = None
    """Minimum time after interrupts were moved."""
    dec_cores_max_each_time: int | None = None
    thresholds: CoresAdjustThresholds | None = None


class CoresAdjust(KatalystStruct, frozen=True, kw_only=True):
    """Number of cores that serve interrupts, in percent of all."""

    percent_min: Percent | None = None
    percent_max: Percent | None = None
    inc_conf: CoresIncrease | None = None
    dec_conf: CoresDecrease | None = None


class IRQTuningConfig(KatalystStruct, frozen=True, kw_only=True):
    """Assignment of network card interrupts to cores."""

    enable_tuner: bool | None = None
    tuning_policy: Annotated[str, schema_default("balance")] | None = None
    """Balance, Exclusive or Auto."""
    tuning_interval: Annotated[int, schema_default(5)] | None = None
    enable_rps: bool | None = field(default=None, name="enableRPS")
    """Steer packets to further cores (RPS); only with the policy Balance."""
    enable_rps_cpu_vs_nics_queue: float | None = field(default=None, name="enableRPSCPUVSNicsQueue")
    """Minimum number of CPUs per queue of the cards for steering packets."""
    disable_xps: bool | None = field(default=None, name="disableXPS")
    nic_affinity_policy: str | None = None
    """CompleteMap, OverallBalance or PhysicalTopo."""
    normal_throughput_nics: tuple[str, ...] | None = None
    """Cards that always count as busy."""
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
    """Nodes with interrupt tuning, and its parameters."""

    config: IRQTuningConfig


class IRQTuningConfiguration(ConfigResource, frozen=True, kw_only=True):
    """Interrupt tuning of the nodes' network cards."""

    spec: IRQTuningConfigurationSpec | None = None
