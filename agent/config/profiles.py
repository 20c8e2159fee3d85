"""Defines the profiles: named sets of ordinary settings, for `--profile` of the agent and `profile` of the chart.
The settings of the file, and the objects of the cluster, override single settings of a profile. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from api.decision import ActMode


class Profile(NamedTuple):
    """A set of settings for one purpose."""

    purpose: str
    act: ActMode
    """Mode of an agent that knows its pods, unless `--act` names one."""
    settings: Mapping[str, Any]
    """Settings that differ from the defaults, in the notation of the settings file."""


OBSERVE, COLOCATE, KATALYST = "observe", "colocate", "katalyst"
PROFILES: Mapping[str, Profile] = {
    OBSERVE: Profile(
        "measures and decides; writes no cgroup, evicts no pod and publishes no reclaimed resource", ActMode.DRY_RUN, {}
    ),
    COLOCATE: Profile(
        "lends idle CPU and memory to reclaimed pods, protects online pods, and evicts reclaimed pods only",
        ActMode.ON,
        {
            "report": {"extendedResources": True},
            "eviction": {
                # No plugin that may select online pods: `*` evicts these too if memory stays short.
                "plugins": [
                    "reclaimed-resource-pressure-eviction-plugin",
                    "reclaimed-numa-resource-pressure-eviction-plugin",
                    "cpu-pressure-suppression-plugin",
                    "oomd-pressure",
                ]
            },
        },
    ),
    KATALYST: Profile(
        "does what Katalyst's quick start shows: disjoint CPU pools, Katalyst's periods and its default evictions",
        ActMode.ON,
        {
            # Period of Katalyst's advisor and of its metrics (katalyst-core, sysadvisor and metaserver: 5 s).
            "intervalS": 5.0,
            # Whole cores per NUMA node would report 42k instead of the quick start's 44k as soon as the system uses any CPU.
            "advisor": {"policy": "canonical", "headroom": {"wholeCores": False}},
            "report": {"extendedResources": True},
            "eviction": {"plugins": ["*"]},
        },
    ),
}


def with_defaults(document: Any, defaults: Mapping[str, Any]) -> Any:
    """Return a settings document with defaults for what it does not set; a list of the document replaces that of the
    defaults. A value that is no section is returned unchanged, for validation to reject."""
    if not isinstance(document, Mapping):
        return document
    merged = {**defaults, **document}
    for name, default in defaults.items():
        if name in document and isinstance(default, Mapping):
            merged[name] = with_defaults(document[name], default)
    return merged


def profile_rows() -> list[tuple[str, tuple[Any, ...]]]:
    """Return each setting of any profile with its value by profile, in the order of PROFILES; "" is the default."""
    values = {name: dict(_leaves(profile.settings, "")) for name, profile in PROFILES.items()}
    names = dict.fromkeys(path for leaves in values.values() for path in leaves)
    return [(path, tuple(leaves.get(path, "") for leaves in values.values())) for path in names]


def _leaves(settings: Mapping[str, Any], above: str) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for name, value in settings.items():
        path = f"{above}{name}"
        leaves += _leaves(value, f"{path}.") if isinstance(value, Mapping) else [(path, value)]
    return leaves
