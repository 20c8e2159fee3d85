"""Profiles of both kinds as the informers have them: an invalid one has no effect, and is logged and counted once."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from api.colocation_profile import ColocationProfile
from controller.reconcile import MetricValues
from controller.webhooks.colocation_profiles import PodProfile, parse_koordinator_profile, parse_profile
from controller.webhooks.webhook_service import (
    COLOCATION_PROFILES,
    INVALID_PROFILES_METRIC,
    KOORDINATOR_PROFILES,
    PodProfiles,
)
from kube.client import KubeClient
from kube.credentials import ApiAccess, ApiCredentials
from kube.informer import Informer
from kube.objects import UnstructuredObject
from kube.watch import WatchEvent, WatchEventType


def an_object(name: str, spec: dict[str, Any], version: str = "1") -> dict[str, Any]:
    return {"apiVersion": "any/v1", "kind": "Any", "metadata": {"name": name, "resourceVersion": version}, "spec": spec}


def notify(informer: Informer[Any], object_: Any) -> None:
    """Deliver a version of an object as the watch does."""
    informer._apply(WatchEvent(WatchEventType.ADDED, object_.metadata.name, "1", object_))


async def test_only_valid_profiles_have_an_effect(caplog: pytest.LogCaptureFixture) -> None:
    client, metrics = KubeClient(ApiAccess("http://127.0.0.1:1", ApiCredentials()), "test"), MetricValues()
    own: Informer[ColocationProfile] = Informer(client, COLOCATION_PROFILES)
    koordinator: Informer[UnstructuredObject] = Informer(client, KOORDINATOR_PROFILES)
    profiles = PodProfiles((own, parse_profile), (koordinator, parse_koordinator_profile), metrics=metrics)
    selector = {"selector": {"matchLabels": {"a": "b"}}}
    own_objects = {"valid": selector, "whole-cluster": {}}
    with caplog.at_level(logging.WARNING):
        for version in ("1", "2"):
            for name, spec in own_objects.items():
                notify(own, msgspec.convert(an_object(name, spec, version), ColocationProfile))
            for name, level in (("be", "BE"), ("lsr", "LSR")):
                notify(koordinator, msgspec.convert(an_object(name, {"qosClass": level}, version), UnstructuredObject))
    assert sorted(profile.name for profile in profiles.profiles) == ["be", "valid"]
    invalid = {("ColocationProfile", "whole-cluster"): 1.0, ("ClusterColocationProfile", "lsr"): 1.0}
    assert metrics.values(INVALID_PROFILES_METRIC) == invalid
    assert [record.getMessage()[:54] for record in caplog.records] == [
        "ColocationProfile whole-cluster has no effect: spec: w",
        "ClusterColocationProfile lsr has no effect: spec.qosCl",
    ]  # fmt: skip


async def test_a_profile_is_parsed_once_when_it_changes_and_goes_with_its_object() -> None:
    """All were parsed at each change: a list of 1000 stopped the controller for 6 s, and one of 5,000 for minutes."""
    client, parsed = KubeClient(ApiAccess("http://127.0.0.1:1", ApiCredentials()), "test"), list[str]()
    own: Informer[ColocationProfile] = Informer(client, COLOCATION_PROFILES)

    def parse(profile: ColocationProfile) -> PodProfile:
        parsed.append(profile.metadata.name or "")
        return parse_profile(profile)

    profiles = PodProfiles((own, parse), metrics=MetricValues())
    spec = {"selector": {"matchLabels": {"a": "b"}}}
    names = [f"p{number:03}" for number in range(100)]
    listed = {name: msgspec.convert(an_object(name, spec), ColocationProfile) for name in names}
    own._notify(iter(own.store.replace(listed)))
    assert parsed == names
    own._notify(iter(own.store.replace({name: listed[name] for name in names[:3]})))
    assert (len(parsed), [profile.name for profile in profiles.profiles]) == (100, names[:3])
    notify(own, msgspec.convert(an_object("p001", {}, "2"), ColocationProfile))
    assert [profile.name for profile in profiles.profiles] == ["p000", "p002"]
