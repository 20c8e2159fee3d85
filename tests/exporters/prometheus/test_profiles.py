"""The metric profiles: how many series a container has in each, and how a series begins that was left out while zero."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from api.decision import Cycle
from api.metric_profiles import (
    LABEL_VALUES,
    LATE_METRICS,
    NOT_SMALL_NODE_METRICS,
    PROFILE_LIMITS,
    STANDARD_CGROUP_METRICS,
    MetricProfile,
    has_metric,
)
from api.metrics import AGENT_METRICS_BY_NAME
from api.snapshot import CgroupSample
from exporters.prometheus.exposition import render_lines
from exporters.prometheus.families import AgentInfo, MetricsState, metric_families
from exporters.prometheus.late_series import START_S, LateSeries, SeriesPhase
from tests.builders.four_cpu_node import S, busy_cycle
from tests.builders.full_node import RICH_ABOUT, full_cycle
from tests.builders.kubelet_node import container_cgroup, kubelet_cycle, pod_cgroup

CONTAINERS = 200
THROTTLED = "dioptase_cgroup_cpu_throttled_seconds_total"


def lines(finished: Cycle, profile: MetricProfile, late: LateSeries | None = None) -> list[str]:
    """The series of a cycle, one per line."""
    observed = MetricsState(version="1").after(finished, AgentInfo(metric_profile=profile))
    text = "".join(render_lines(metric_families(observed, late), openmetrics=False))
    return [line for line in text.splitlines() if not line.startswith("#")]


def by_cgroup(shown: list[str]) -> Counter[str]:
    """Number of series of each cgroup."""
    return Counter(line.split('cgroup="', 1)[1].split('"', 1)[0] for line in shown if '{cgroup="' in line)


@pytest.mark.parametrize(
    ("profile", "online", "batch", "of_all_cgroups"),
    [
        (MetricProfile.SMALL, 18, 17, 3570),
        (MetricProfile.STANDARD, 57, 56, 11_526),
        (MetricProfile.FULL, 198, 196, 88_118),
    ],
)
def test_an_ordinary_container_has_so_many_series(
    profile: MetricProfile, online: int, batch: int, of_all_cgroups: int
) -> None:
    numbers = by_cgroup(lines(kubelet_cycle(2, CONTAINERS), profile))
    assert (numbers[container_cgroup(0)], numbers[container_cgroup(1)]) == (online, batch)
    assert numbers.total() == of_all_cgroups
    limit = PROFILE_LIMITS[profile].series_per_container
    if limit is not None:
        assert max(online, batch, numbers.total() / CONTAINERS) <= limit


def test_with_throttling_reclaim_and_everything_else_a_container_has_30_series_more() -> None:
    finished = kubelet_cycle(2, 2)
    rich = full_cycle(2).snapshot.cgroups["/web"]
    path = container_cgroup(0)
    worst = msgspec.structs.replace(
        rich, path=path, id=finished.snapshot.cgroups[path].id, blame=finished.snapshot.cgroups[path].blame
    )
    cgroups = {**finished.snapshot.cgroups, path: worst}
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups=cgroups)
    changed = msgspec.structs.replace(finished, snapshot=snapshot)
    assert by_cgroup(lines(changed, MetricProfile.STANDARD))[path] == 83


def test_containers_and_classes_have_series_in_standard_and_cgroups_of_pods_only_in_full() -> None:
    finished = kubelet_cycle(2, 2)
    containers = {container_cgroup(0), container_cgroup(1)}
    above = {"/", "/kubepods", "/kubepods/burstable", "/kubepods/besteffort", "/system.slice"}
    assert set(by_cgroup(lines(finished, MetricProfile.STANDARD))) == containers | above
    everything = set(by_cgroup(lines(finished, MetricProfile.FULL)))
    assert everything == set(finished.snapshot.cgroups)
    assert everything > {pod_cgroup(0), f"{pod_cgroup(0)}/pause", "/system.slice/kubelet.service"}


def test_a_machine_without_pods_has_series_of_every_cgroup_in_every_profile() -> None:
    finished = kubelet_cycle(2, 2)
    alone = msgspec.structs.replace(finished, snapshot=msgspec.structs.replace(finished.snapshot, pods=()))
    assert set(by_cgroup(lines(alone, MetricProfile.SMALL))) == set(finished.snapshot.cgroups)


def test_cgroups_that_the_profile_leaves_out_do_not_count_as_dropped() -> None:
    about = AgentInfo(metric_profile=MetricProfile.STANDARD, max_cgroups=5)
    # 2 containers and 5 others are of the profile, 5 cgroups of pods, pause containers and services are not.
    assert MetricsState(version="1").after(kubelet_cycle(2, 2), about).dropped["cgroup"] == 2


def test_each_profile_is_part_of_the_next() -> None:
    finished = kubelet_cycle(2, 4)
    series = [
        {line.rpartition(" ")[0] for line in lines(finished, profile) if 'le="' not in line}
        for profile in MetricProfile
    ]
    assert series[0] < series[1] < series[2]


def test_a_profile_changes_no_value() -> None:
    finished = kubelet_cycle(2, 4)
    full = set(lines(finished, MetricProfile.FULL))
    assert set(lines(finished, MetricProfile.STANDARD)) <= full
    assert set(lines(finished, MetricProfile.SMALL)) <= full


def test_the_exemplar_of_the_longest_wait_is_in_the_bucket_that_includes_it() -> None:
    about = msgspec.structs.replace(RICH_ABOUT, metric_profile=MetricProfile.STANDARD)
    observed = MetricsState(version="1").after(full_cycle(2), about)
    text = "".join(render_lines(metric_families(observed), openmetrics=True))
    (web,) = (
        line for line in text.splitlines() if "runq_wait_seconds_bucket" in line and '"web"' in line and "#" in line
    )
    assert 'le="0.016384"' in web
    assert "} 0.016384 " in web


def test_tables_name_metrics_labels_and_bounds_of_the_catalogue() -> None:
    for values in LABEL_VALUES.values():
        for name, allowed in values.items():
            assert allowed.keys() <= set(AGENT_METRICS_BY_NAME[name].labels)
    assert AGENT_METRICS_BY_NAME.keys() >= STANDARD_CGROUP_METRICS | LATE_METRICS | NOT_SMALL_NODE_METRICS
    assert {AGENT_METRICS_BY_NAME[name].kind for name in LATE_METRICS} == {"counter", "histogram"}
    full = PROFILE_LIMITS[MetricProfile.FULL]
    for limits in PROFILE_LIMITS.values():
        assert set(limits.latency_slots) <= set(full.latency_slots)
        assert set(limits.coarse_slots) <= set(full.coarse_slots)
    assert all(has_metric(MetricProfile.FULL, metric) for metric in AGENT_METRICS_BY_NAME.values())


def phases(late: LateSeries, counted_from_s: int, until_s: int, every_s: int) -> list[SeriesPhase]:
    """What the series of one cgroup shows in scrapes that are evenly spread."""
    shown = []
    for at_s in range(0, until_s + 1, every_s):
        late.keep_only([7], at_s * S)
        shown.append(late.phase(7, ("x", ()), at_s * S, counted=at_s >= counted_from_s))
    return shown


def test_a_series_that_begins_late_is_zero_for_a_minute_and_stays() -> None:
    absent, zero, value = SeriesPhase.ABSENT, SeriesPhase.ZERO, SeriesPhase.VALUE
    assert phases(LateSeries(), 100, 240, 30) == [absent] * 4 + [zero] * 2 + [value] * 3
    # A scraper that comes once a minute sees the zero, too.
    assert phases(LateSeries(), 100, 240, START_S) == [absent, absent, zero, value, value]


def test_a_series_of_a_cgroup_that_is_new_begins_with_its_value() -> None:
    assert phases(LateSeries(), 0, 30, 30) == [SeriesPhase.VALUE] * 2
    assert phases(LateSeries(), 30, 60, 30) == [SeriesPhase.ABSENT, SeriesPhase.VALUE, SeriesPhase.VALUE]


def test_a_cgroup_that_comes_back_with_another_inode_is_new() -> None:
    late = LateSeries()
    late.keep_only([7], 0)
    assert late.phase(7, ("x", ()), 0, counted=True) is SeriesPhase.VALUE
    late.keep_only([8], 100 * S)
    late.keep_only([7], 200 * S)
    assert late.phase(7, ("x", ()), 200 * S, counted=False) is SeriesPhase.ABSENT


def throttled_web(finished: Cycle, at_s: int, throttled_ns: int) -> Cycle:
    web: CgroupSample = msgspec.structs.replace(finished.snapshot.cgroups["/web"], throttled_ns=throttled_ns)
    snapshot = msgspec.structs.replace(
        finished.snapshot, cgroups={**finished.snapshot.cgroups, "/web": web}, taken_at_ns=at_s * S
    )
    return msgspec.structs.replace(finished, snapshot=snapshot)


def test_the_first_increase_of_a_late_counter_is_counted_by_a_scraper() -> None:
    """Throttled for 5 s after 90 s, for 6 s after 180 s: a scraper at 30 s sees an increase from 0 to 6."""
    late, values = LateSeries(), []
    for at_s in range(0, 241, 30):
        throttled_ns = 0 if at_s < 90 else 5 * S if at_s < 180 else 6 * S
        shown = lines(throttled_web(busy_cycle(2), at_s, throttled_ns), MetricProfile.STANDARD, late)
        values += [float(line.rpartition(" ")[2]) for line in shown if line.startswith(THROTTLED) and '"/web"' in line]
    assert values == [0, 0, 5, 6, 6, 6]
