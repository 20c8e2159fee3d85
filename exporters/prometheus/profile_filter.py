"""Reduces the metrics of cgroups to those of a metric profile (api/metric_profiles.py), and begins late series with zero."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from api.metric_profiles import PROFILE_LIMITS, MetricProfile, ProfileLimits, has_metric, is_late, label_filter
from api.metrics import AGENT_METRICS_BY_NAME
from api.snapshot import CgroupSample, Snapshot
from api.text import encodable
from exporters.prometheus.late_series import LateSeries, SeriesPhase
from exporters.prometheus.metric_family import (
    BucketLayout,
    Labels,
    MetricDistribution,
    MetricFamily,
    MetricPoint,
    zero_distribution,
)

NO_POD_LABELS: Labels = ("", "", "", "")
"""Namespace, pod, container and QoS level of a cgroup that no listed pod owns."""
LATENCY_LAYOUTS = {profile: BucketLayout(limits.latency_slots) for profile, limits in PROFILE_LIMITS.items()}
COARSE_LAYOUTS = {profile: BucketLayout(limits.coarse_slots) for profile, limits in PROFILE_LIMITS.items()}
_POD_CGROUP = re.compile(r"(?:.*-)?pod[^/]*")
"""Name of the cgroup of a pod, with either driver of the kubelet (pkg/kubelet/cm/pod_container_manager_linux.go)."""


class CgroupSeries(NamedTuple):
    """One cgroup that has series, with the values of CGROUP_LABELS."""

    owner: Labels
    sample: CgroupSample


class SeriesScope(NamedTuple):
    """What limits the series of cgroups: setting of the profile, and number of cgroups."""

    profile: MetricProfile
    max_cgroups: int

    @property
    def limits(self) -> ProfileLimits:
        return PROFILE_LIMITS[self.profile]


class ProfileFilter:
    """Selects the series of one snapshot. Without `late`, a late series has its value as soon as that is not zero."""

    def __init__(
        self, profile: MetricProfile, shown: Iterable[CgroupSeries], now_ns: int, late: LateSeries | None
    ) -> None:
        self.profile, self._now_ns, self._late = profile, now_ns, late
        self._ids = {owner: sample.id for owner, sample in shown}
        if late is not None:
            late.keep_only(self._ids.values(), now_ns)

    def has(self, name: str) -> bool:
        return has_metric(self.profile, AGENT_METRICS_BY_NAME[name])

    def select(self, family: MetricFamily) -> MetricFamily:
        """Return the series of a family that the profile has."""
        metric, points, distributions = family
        if (allowed := label_filter(self.profile, metric)) and points:
            points = tuple(point for point in points if all(point.own[place] in values for place, values in allowed))
        if is_late(self.profile, metric):
            points = tuple(shown for point in points if (shown := self._late_point(metric.name, point)))
            distributions = tuple(
                selected for each in distributions if (selected := self._late_distribution(metric.name, each))
            )
        return MetricFamily(metric, points, distributions)

    def _late_point(self, name: str, point: MetricPoint) -> MetricPoint | None:
        phase = self._phase(name, point.owner, point.own, counted=point.value > 0)
        if phase is SeriesPhase.ABSENT:
            return None
        return point if phase is SeriesPhase.VALUE else point._replace(value=0)

    def _late_distribution(self, name: str, shown: MetricDistribution) -> MetricDistribution | None:
        phase = self._phase(name, shown.owner, shown.own, counted=shown.cumulative[-1] > 0)
        if phase is SeriesPhase.ABSENT:
            return None
        return shown if phase is SeriesPhase.VALUE else zero_distribution(shown)

    def _phase(self, name: str, owner: Labels, own: Labels, *, counted: bool) -> SeriesPhase:
        if self._late is None:
            return SeriesPhase.VALUE if counted else SeriesPhase.ABSENT
        return self._late.phase(self._ids[owner], (name, own), self._now_ns, counted=counted)


def select_cgroups(snapshot: Snapshot, scope: SeriesScope) -> list[CgroupSeries]:
    """Return the cgroups that have series: if there are too many, first those of pods, then those nearest to the root."""
    owners = {
        container.cgroup: (pod.namespace, pod.name, container.name, pod.qos.value)
        for pod in snapshot.pods
        for container in pod.containers
    }
    paths = profile_cgroups(snapshot, scope)
    if len(paths) > scope.max_cgroups:
        paths = sorted(paths, key=lambda path: (path not in owners, path.count("/"), path))[: scope.max_cgroups]
    return [
        CgroupSeries(tuple(map(encodable, (path, *owners.get(path, NO_POD_LABELS)))), snapshot.cgroups[path])
        for path in paths
    ]


def profile_cgroups(snapshot: Snapshot, scope: SeriesScope) -> list[str]:
    """Return the cgroups of the profile.

    On a node with pods, small profiles have containers, QoS classes and other ancestors of containers, and the cgroups
    directly below the root. Without pods they have all, because the services of a machine are then what runs there.
    """
    containers = {container.cgroup for pod in snapshot.pods for container in pod.containers}
    if not scope.limits.container_cgroups_only or not containers:
        return list(snapshot.cgroups)
    ancestors = {parent for path in containers for parent in _ancestors(path)}
    return [
        path
        for path in snapshot.cgroups
        if path in containers
        or path.count("/") <= 1
        or (path in ancestors and _POD_CGROUP.fullmatch(path.rpartition("/")[2]) is None)
    ]


def _ancestors(path: str) -> Iterable[str]:
    while path := path.rpartition("/")[0]:
        yield path
