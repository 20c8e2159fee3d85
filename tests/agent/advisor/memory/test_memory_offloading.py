"""Memory offloading: precedence of settings, the policies' formulas, when a cgroup is evaluated and what it releases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.advisor.memory import memory_offloading
from agent.advisor.memory.memory_inputs import MemoryAdvisorState, MemoryInputs
from agent.advisor.memory.memory_offloading import (
    OffloadResult,
    OffloadSettings,
    cgroup_offload_settings,
    offload_memory,
    pod_offload_settings,
)
from agent.config.memory import MemoryConfig, OffloadingBlockConfig, OffloadingConfig, OffloadingLayerConfig
from api.knobs import Knob
from api.pod import Pod
from api.qos import Enhancements, QoSLevel
from api.snapshot import Pressure
from api.units import GIB, MIB
from tests.agent.advisor.memory.builders import S, group, pod, situation

ON, OFF = OffloadingLayerConfig(enable=True), OffloadingLayerConfig(enable=False)
SHARED = QoSLevel.SHARED
WEB = pod("web", SHARED, labels={"app": "web"}, annotations={"tier": "gold"})


@pytest.mark.parametrize(
    ("config", "fields", "enable", "policy"),
    [
        (OffloadingConfig(), {}, False, "psi"),
        (OffloadingConfig(default=ON), {}, True, "psi"),
        (OffloadingConfig(default=ON, levels={SHARED: OFF}), {}, False, "psi"),
        (OffloadingConfig(default=ON, levels={QoSLevel.RECLAIMED: OFF}), {}, True, "psi"),
        (OffloadingConfig(levels={SHARED: ON}, pools={"share": OFF}), {}, False, "psi"),
        (OffloadingConfig(levels={SHARED: ON}, pools={"batch": OFF}), {}, True, "psi"),
        (OffloadingConfig(levels={SHARED: ON}, pools={"share": OffloadingLayerConfig(policy="refault")}), {}, True, "refault"),
        (OffloadingConfig(pools={"share": ON}), {"not_reclaimable": ("default/web",)}, False, "psi"),
        (OffloadingConfig(pools={"share": ON}), {"not_reclaimable": ("default/web",), "profiles": {"default/web": ON}},
         True, "psi"),
        (OffloadingConfig(pools={"share": ON}), {"profiles": {"default/web": OFF}}, False, "psi"),
        (OffloadingConfig(default=ON, block=OffloadingBlockConfig(labels={"app": ("web",)})),
         {"profiles": {"default/web": ON}}, False, "psi"),
        (OffloadingConfig(default=ON, block=OffloadingBlockConfig(labels={"app": ("db",)})), {}, True, "psi"),
        (OffloadingConfig(default=ON, block=OffloadingBlockConfig(annotations={"tier": ()})), {}, False, "psi"),
    ],
)  # fmt: skip
def test_precedence(config: OffloadingConfig, fields: dict[str, Any], enable: bool, policy: str) -> None:
    result = pod_offload_settings(WEB, situation([WEB], **fields), config)
    assert (result.enable, result.policy) == (enable, policy)


def test_each_setting_is_laid_over_by_itself() -> None:
    config = OffloadingConfig(
        default=OffloadingLayerConfig(enable=True, reclaim_accuracy_target=0.9, interval_s=60),
        levels={SHARED: OffloadingLayerConfig(reclaim_scan_efficiency_target=0.5)},
    )
    result = pod_offload_settings(WEB, situation([WEB]), config)
    assert result == OffloadSettings(
        enable=True, reclaim_accuracy_target=0.9, reclaim_scan_efficiency_target=0.5, interval_s=60
    )


@pytest.mark.parametrize(
    ("qos", "named", "pool"),
    [
        (SHARED, "", "share"),
        (SHARED, "batch", "batch"),
        (QoSLevel.DEDICATED, "", "dedicated"),
        (QoSLevel.RECLAIMED, "", "reclaim"),
        (QoSLevel.SYSTEM, "", "reserve"),
    ],
)
def test_the_pool_of_a_pod(qos: QoSLevel, named: str, pool: str) -> None:
    owner = pod("x", qos)
    owner = replace(owner, enhancements=Enhancements(cpuset_pool=named))
    config = OffloadingConfig(pools={pool: ON})
    assert pod_offload_settings(owner, situation([owner]), config).enable


def test_a_cgroup_by_path_has_its_own_settings_and_the_default() -> None:
    config = OffloadingConfig(
        default=OffloadingLayerConfig(interval_s=45), cgroups={"/batch": ON}, levels={SHARED: OFF}, pools={"share": OFF}
    )
    assert cgroup_offload_settings("/batch", config) == OffloadSettings(enable=True, interval_s=45)


def test_senpai_has_an_interval_of_its_own() -> None:
    assert (
        pod_offload_settings(
            WEB, situation([WEB]), OffloadingConfig(default=OffloadingLayerConfig(policy="senpai"))
        ).interval_s
        == 6
    )
    slow = OffloadingLayerConfig(policy="senpai", interval_s=12)
    assert pod_offload_settings(WEB, situation([WEB]), OffloadingConfig(default=slow)).interval_s == 12


def config(policy: str = "psi", **fields: Any) -> MemoryConfig:
    layer = OffloadingLayerConfig(enable=True, policy=policy, **fields)  # type: ignore[arg-type]
    return MemoryConfig(offloading=OffloadingConfig(levels={SHARED: layer}))


def node(
    at_s: float, *, swap: tuple[float, float] = (0, 0), read_s: float | None = None, owner: Pod = WEB, **fields: Any
) -> MemoryInputs:
    """Return a node with 10 GiB in use, 8 of it cache, by default without pressure."""
    base: dict[str, Any] = {"memory_bytes": 10 * GIB, "avg60": 0.0, "anon": 2, "file": 8, "mapped": 1}
    base |= {"inactive_anon": 1, "inactive_file": 3, "active_file": 5}
    base["io_pressure"] = Pressure(some_us=0, some_avg10=0.0)
    sample = group("/web", read_at_ns=round((at_s if read_s is None else read_s) * S), **(base | fields))
    return situation([owner], [sample], at_s=at_s, meminfo={"SwapTotal": swap[0], "SwapFree": swap[1]})


def pages(scanned: int, stolen: int, activated: int) -> dict[str, Mapping[str, int]]:
    return {"stat": {"pgscan": scanned, "pgsteal": stolen, "workingset_activate_file": activated,
                     "workingset_activate_anon": 0}}  # fmt: skip


def run(
    inputs: MemoryInputs, config: MemoryConfig, before: OffloadResult | None = None, busy: tuple[str, ...] = ()
) -> OffloadResult:
    return offload_memory(
        inputs,
        config,
        MemoryAdvisorState(offloaded=before.past, swap=before.swap) if before else MemoryAdvisorState(),
        busy,
    )


def requested_bytes(result: OffloadResult) -> dict[str, int]:
    return {
        request.cgroup: int(request.value) for request in result.knob_requests if request.knob is Knob.MEMORY_RECLAIM
    }


def test_nothing_is_offloaded_unless_configured() -> None:
    assert run(node(1000), MemoryConfig()).knob_requests == ()


def test_psi_requests_a_hundredth_and_then_waits_for_an_interval_and_a_new_reading() -> None:
    first = run(node(1000), config())
    assert requested_bytes(first) == {"/web": 10 * GIB // 100}
    assert requested_bytes(run(node(1029), config(), first)) == {}
    assert requested_bytes(run(node(1030, read_s=1000), config(), first)) == {}  # what was given is not seen yet
    second = run(node(1030), config(), first)
    assert requested_bytes(second) == {"/web": 10 * GIB // 100}
    assert requested_bytes(run(node(1031), config(), second)) == {}


@pytest.mark.parametrize(("avg60", "expected"), [(0.05, 10 * GIB // 200), (0.1, 0), (3.0, 0)])
def test_psi_requests_less_under_pressure(avg60: float, expected: int) -> None:
    assert requested_bytes(run(node(1000, avg60=avg60), config())) == ({"/web": expected} if expected else {})


def test_refault_only_measures_in_its_first_interval() -> None:
    first = run(node(1000, **pages(10**6, 10**5, 10**5)), config("refault"))
    assert requested_bytes(first) == {}
    good = run(node(1030, **pages(10**6 + 100, 10**5 + 90, 10**5)), config("refault"), first)
    assert requested_bytes(good) == {
        "/web": 10 * GIB // 100
    }  # a tenth of 4 GiB inactive, but no more than 1 % of the use
    bad = run(node(1060, **pages(10**6 + 200, 10**5 + 190, 10**5 + 10)), config("refault"), good)
    assert requested_bytes(bad) == {"/web": int(10 * GIB / 100 * 0.9)}
    again = run(node(1090, **pages(5, 5, 0)), config("refault"), bad)  # a counter went backwards
    assert requested_bytes(again) == {}


def test_integrated_is_the_smaller_of_both() -> None:
    first = run(node(1000, **pages(0, 0, 0)), config("integrated"))
    calm = run(node(1030, **pages(100, 90, 0)), config("integrated", psi_max_probe=0.005), first)
    assert requested_bytes(calm) == {"/web": 10 * GIB // 200}
    pressed = run(node(1030, avg60=0.1, **pages(100, 90, 0)), config("integrated"), first)
    assert requested_bytes(pressed) == {}
    wrong = run(node(1060, **pages(200, 180, 90)), config("integrated", psi_max_probe=0.005), calm)
    assert requested_bytes(wrong) == {}


def test_senpai_probes_without_stalls_and_backs_off_with_them() -> None:
    first = run(node(1000, stall_us=0), config("senpai"))
    assert requested_bytes(first) == {}
    probe = run(node(1006, stall_us=0), config("senpai"), first)
    assert requested_bytes(probe) == {"/web": 10 * GIB // 100}
    size = 9.9 * GIB
    assert probe.past["/web"].size_bytes == pytest.approx(size)
    less = {"memory_bytes": round(size)}
    stalled = run(node(1012, stall_us=100_000, **less), config("senpai"), probe)  # ten times the aim
    assert requested_bytes(stalled) == {}
    assert stalled.past["/web"].size_bytes == 10 * GIB  # 1.25 x, but not beyond what is aimed at most
    late = run(node(1024, stall_us=110_000, **less), config("senpai"), stalled)  # 10 ms in two intervals: half the aim
    assert requested_bytes(late) == {"/web": pytest.approx(size * 0.04 * 0.01, abs=1)}


@pytest.mark.parametrize(
    "fields",
    [{"avg60": 0.1}, {"io_pressure": Pressure(some_us=0, some_avg10=0.1)}],
)
def test_senpai_requests_nothing_under_memory_or_io_pressure(fields: dict[str, Any]) -> None:
    first = run(node(1000, stall_us=0), config("senpai"))
    assert requested_bytes(run(node(1006, stall_us=0, **fields), config("senpai"), first)) == {}


def test_senpai_swaps_no_faster_than_a_mib_a_second() -> None:
    lean = {"anon": 10, "file": 0, "mapped": 0, "inactive_file": 0, "active_file": 0, "swap": (8, 8)}
    swapping = config("senpai", enable_swap=True)
    first = run(node(1000, stall_us=0, **lean), swapping)
    assert requested_bytes(run(node(1006, stall_us=0, **lean), swapping, first)) == {"/web": 6 * MIB}


@pytest.mark.parametrize(
    ("swap", "enable", "value", "given"),
    [
        ((0, 0), True, None, {}),  # the node has none
        ((8, 8), False, "0", {}),
        ((8, 8), True, "max", {"/web": 10 * GIB // 100}),
        ((10, 2), True, "max", {"/web": 10 * GIB // 100}),  # 80 % used
        ((10, 1.9), True, "0", {}),
    ],
)
def test_swap(swap: tuple[float, float], enable: bool, value: str | None, given: dict[str, int]) -> None:
    """None of the 10 GiB is cache that could be released without swap."""
    result = run(node(1000, swap=swap, file=1.9, mapped=1), config(enable_swap=enable))
    assert [request.value for request in result.knob_requests if request.knob is Knob.SWAP_MAX] == (
        [] if value is None else [value]
    )
    assert requested_bytes(result) == given


def test_swap_stays_set_between_intervals() -> None:
    first = run(node(1000, swap=(8, 8)), config())
    again = run(node(1001, swap=(8, 8)), config(), first)
    assert [(request.knob, request.value) for request in again.knob_requests] == [(Knob.SWAP_MAX, "0")]


@pytest.mark.parametrize("enable", [True, False])
def test_swap_stays_as_it_was_where_a_reading_is_missing(enable: bool) -> None:
    """80 % of swap is used: `max` where it is enabled. A value that is no longer requested would be restored."""
    value, settings = "max" if enable else "0", config(enable_swap=enable)
    first = run(node(1000, swap=(10, 2)), settings)
    blind = node(1001)
    unknown = replace(blind.snapshot.node, meminfo={})
    blind = replace(blind, snapshot=replace(blind.snapshot, node=unknown))
    no_pods = replace(blind, snapshot=replace(blind.snapshot, cgroups={}))
    other = replace(blind.snapshot.cgroups["/web"], id=8)
    recreated = replace(blind, snapshot=replace(blind.snapshot, cgroups={"/web": other}))

    def swaps(result: OffloadResult) -> list[str]:
        return [request.value for request in result.knob_requests if request.knob is Knob.SWAP_MAX]

    assert swaps(run(node(1100, swap=(10, 2), read_s=1000), settings, first)) == [value], (
        "its files were not read again"
    )
    second = run(blind, settings, first)
    assert (swaps(second), requested_bytes(second)) == ([value], {})
    assert swaps(run(blind, settings, run(no_pods, settings, second))) == [value]
    assert swaps(run(recreated, settings, second)) == swaps(run(blind, settings)) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_reclaim_bytes": 50 * MIB}, 50 * MIB),
        ({"reserved_inactive_file_bytes": 1023 * MIB}, MIB),  # 3 GiB inactive - 2 x 1 GiB mapped - 1023 MiB
        ({"reserved_inactive_file_bytes": 1024 * MIB}, 0),
        ({"max_reclaim_bytes": 0}, 0),
    ],
)
def test_caps(fields: dict[str, Any], expected: int) -> None:
    assert requested_bytes(run(node(1000), config(**fields))) == ({"/web": expected} if expected else {})


@pytest.mark.parametrize(
    ("policy", "change", "what"),
    [
        ("psi", {"memory_pressure": None}, "its memory pressure"),
        ("psi", {"memory_bytes": None}, "its memory"),
        ("psi", {"memory_stat": {}}, "its cache"),
        ("refault", {"memory_stat": {"inactive_anon": 1, "inactive_file": 1}}, "its reclaim counters"),
        ("integrated", {"memory_pressure": None}, "its memory pressure"),
        ("senpai", {"io_pressure": None}, "its I/O pressure"),
        ("senpai", {"memory_pressure": None}, "its memory pressure"),
        ("psi", {"files_read_at_ns": 900 * S}, "a recent reading"),
    ],
)
def test_a_missing_input_gives_no_offload_request(policy: str, change: dict[str, Any], what: str) -> None:
    inputs = node(1000)
    sample = replace(inputs.snapshot.cgroups["/web"], **change)
    snapshot = replace(inputs.snapshot, cgroups={**inputs.snapshot.cgroups, "/web": sample})
    result = run(replace(inputs, snapshot=snapshot), config(policy))
    assert requested_bytes(result) == {}
    assert [reason.rule for reason in result.reasons] == ["memory_offload_unknown"]
    assert what in result.reasons[0].text


def test_a_gap_in_the_readings_does_not_shorten_the_interval() -> None:
    first = run(node(1000), config())
    gap = run(node(1010, memory_bytes=None), config(), first)
    stale = run(node(1012, read_s=900), config(), gap)
    assert requested_bytes(run(node(1015), config(), stale)) == {}


def test_a_recreated_cgroup_has_no_state() -> None:
    first = run(node(1000, **pages(0, 0, 0)), config("refault"))
    again = run(node(1030, number=99, **pages(100, 90, 0)), config("refault"), first)
    assert requested_bytes(again) == {}
    assert again.past["/web"].cgroup_id == 99


def test_a_cgroup_that_drops_cache_is_not_offloaded_too() -> None:
    assert requested_bytes(run(node(1000), config(), busy=("/web",))) == {}


def test_a_configured_path_is_evaluated_once_with_its_own_settings() -> None:
    offloading = OffloadingConfig(
        levels={SHARED: ON}, cgroups={"/web": OffloadingLayerConfig(enable=True, psi_max_probe=0.005)}
    )
    result = run(node(1000), MemoryConfig(offloading=offloading))
    assert [request.value for request in result.knob_requests] == [str(10 * GIB // 200)]


TARGETS = memory_offloading.RefaultTargets(accuracy=0.99, efficiency=0.6, max_probe=0.01)
SENPAI = memory_offloading.SenpaiLaw(0.01, 100e6, 10e9, 0.01, 1.0, 10.0, 20.0)


@pytest.mark.parametrize(
    ("avg60", "expected"), [(0.0, 10.0), (0.05, 5.0), (0.09, 1.0), (0.1, 0.0), (0.2, 0.0), (50.0, 0.0)]
)
def test_psi(avg60: float, expected: float) -> None:
    assert memory_offloading.psi_target(1000.0, avg60, 0.01, 0.1) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pages", "last", "expected"),
    [
        (
            memory_offloading.ReclaimedPages(0, 0, 0),
            0.0,
            50.0,
        ),  # nothing was reclaimed, which is no fault: a tenth of what is inactive
        (memory_offloading.ReclaimedPages(100, 90, 0), 60.0, 63.0),  # well: 5 % more
        (memory_offloading.ReclaimedPages(100, 90, 0), 40.0, 50.0),  # or a tenth of what is inactive, whichever is more
        (memory_offloading.ReclaimedPages(100, 90, 0), 99.0, 100.0),  # and never more than 1 % of the use
        (memory_offloading.ReclaimedPages(100, 100, 1), 60.0, 63.0),  # accuracy 0.99 is enough
        (memory_offloading.ReclaimedPages(200, 200, 3), 60.0, 59.1),  # 0.985 is not: 60 x 0.985
        (memory_offloading.ReclaimedPages(100, 60, 0), 60.0, 63.0),  # efficiency 0.6 is enough
        (
            memory_offloading.ReclaimedPages(100, 59, 0),
            60.0,
            60.0,
        ),  # 0.59 is not, but what came was right: no more than the last time
        (memory_offloading.ReclaimedPages(100, 100, 100), 60.0, 0.0),
        (memory_offloading.ReclaimedPages(100, 100, 250), 60.0, 0.0),  # more came back than went: never negative
        (memory_offloading.ReclaimedPages(100, 0, 5), 60.0, 63.0),  # nothing was reclaimed
    ],
)
def test_refault(pages: memory_offloading.ReclaimedPages, last: float, expected: float) -> None:
    assert memory_offloading.refault_target(
        last, pages, inactive=500.0, usage=10_000.0, targets=TARGETS
    ) == pytest.approx(expected)


def test_refault_starts_without_inactive_pages() -> None:
    """It starts with a tenth of 1 % of the use and then grows as usual."""
    quiet = memory_offloading.ReclaimedPages(0, 0, 0)
    assert memory_offloading.refault_target(0.0, quiet, inactive=0.0, usage=10_000.0, targets=TARGETS) == pytest.approx(
        10
    )
    assert memory_offloading.refault_target(
        40.0, quiet, inactive=0.0, usage=10_000.0, targets=TARGETS
    ) == pytest.approx(42)
    assert memory_offloading.refault_target(0.0, quiet, inactive=0.0, usage=0.0, targets=TARGETS) == 0


@pytest.mark.parametrize(
    ("stall_s", "size", "new_size", "requests"),
    [
        (0.0, 1e9, 0.99e9, 0.01e9),  # no stall at all: the largest probe
        (0.001, 1e9, 0.99e9, 0.01e9),  # ten times below the aim: just so
        (0.005, 1e9, 1e9 - 0.04 * 0.01e9, 0.04 * 0.01e9),  # twice below: (2/10)^2 of it
        (0.01, 1e9, 1.0025e9, 0.0),  # at the aim: back off by (1/20)^2
        (0.1, 1e9, 1.25e9, 0.0),  # ten times above: (10/20)^2
        (0.2, 1e9, 2e9, 0.0),  # twenty times: all of it
        (5.0, 1e9, 2e9, 0.0),
        (0.2, 8e9, 10e9, 0.0),  # the size aimed at is bounded
        (0.0, 0.5e9, 0.495e9, 0.01e9),  # far below what is used: step by step all the same
        (0.0, 3e9, 0.99e9, 0.01e9),  # shrunk by itself
    ],
)
def test_senpai(stall_s: float, size: float, new_size: float, requests: float) -> None:
    result = memory_offloading.senpai_target(1e9, size, stall_s, SENPAI)
    assert result == (pytest.approx(new_size), pytest.approx(requests))


@pytest.mark.parametrize("usage", [50e6, 100e6])
def test_senpai_leaves_small_groups_alone(usage: float) -> None:
    assert memory_offloading.senpai_target(usage, usage, 0.0, SENPAI)[1] == 0.0


@pytest.mark.parametrize(
    ("cache", "mapped", "inactive", "reserved", "expected"),
    [
        (200 << 20, 100 << 20, 0, None, 50 << 20),  # twice what is mapped: there is something to give
        ((200 << 20) - 1, 100 << 20, 0, None, 0),  # less: it is in use
        (20 << 20, 0, 0, None, 40 << 20),  # twice the cache that is not mapped
        (0, 0, 0, None, 1 << 20),  # a MiB is always allowed
        (1000 << 20, 100 << 20, 350 << 20, 100 << 20, 50 << 20),  # Katalyst's own: 350 - 2 x 100 - 100
        (1000 << 20, 100 << 20, 330 << 20, 100 << 20, 30 << 20),
        (1000 << 20, 100 << 20, 280 << 20, 100 << 20, 0),
    ],
)
def test_without_swap(cache: float, mapped: float, inactive: float, reserved: float | None, expected: float) -> None:
    assert memory_offloading.limit_without_swap(50 << 20, cache, mapped, inactive, reserved) == expected


sizes = st.floats(0, 1e13, allow_nan=False)
counts = st.integers(0, 10**9)


@given(sizes, sizes, st.floats(0, 100), counts, counts, counts, sizes)
def test_targets_are_between_zero_and_the_probe(
    usage: float, last: float, avg60: float, scanned: int, stolen: int, activated: int, inactive: float
) -> None:
    assert 0 <= memory_offloading.psi_target(usage, avg60, 0.01, 0.1) <= usage * 0.01
    requests = memory_offloading.refault_target(
        last, memory_offloading.ReclaimedPages(scanned, stolen, activated), inactive, usage, TARGETS
    )
    assert 0 <= requests <= max(last, usage * 0.01)
    size, requests = memory_offloading.senpai_target(usage, last, avg60 / 100, SENPAI)
    assert 0 <= requests <= usage * 0.01
    assert 0 <= size <= max(usage, last, 10e9)
