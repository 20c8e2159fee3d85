"""Profiles of both kinds as the informers have them: an invalid one has no effect, and is logged and counted once."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from api.colocation_profile import ColocationProfile
from controller.reconcile import MetricValues
from controller.webhooks.colocation_profiles import parse_koordinator_profile, parse_profile
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


def an_object(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "any/v1", "kind": "Any", "metadata": {"name": name}, "spec": spec}


async def test_only_valid_profiles_have_an_effect(caplog: pytest.LogCaptureFixture) -> None:
    client, metrics = KubeClient(ApiAccess("http://127.0.0.1:1", ApiCredentials()), "test"), MetricValues()
    own: Informer[ColocationProfile] = Informer(client, COLOCATION_PROFILES)
    koordinator: Informer[UnstructuredObject] = Informer(client, KOORDINATOR_PROFILES)
    profiles = PodProfiles((own, parse_profile), (koordinator, parse_koordinator_profile), metrics=metrics)
    selector = {"selector": {"matchLabels": {"a": "b"}}}
    own_objects = {"valid": selector, "whole-cluster": {}}
    for name, spec in own_objects.items():
        own.store.put(name, msgspec.convert(an_object(name, spec), ColocationProfile))
    for name, level in (("be", "BE"), ("lsr", "LSR")):
        koordinator.store.put(name, msgspec.convert(an_object(name, {"qosClass": level}), UnstructuredObject))
    with caplog.at_level(logging.WARNING):
        profiles.parse()
        profiles.parse()
    assert sorted(profile.name for profile in profiles.profiles) == ["be", "valid"]
    invalid = {("ColocationProfile", "whole-cluster"): 1.0, ("ClusterColocationProfile", "lsr"): 1.0}
    assert metrics.values(INVALID_PROFILES_METRIC) == invalid
    assert [record.getMessage()[:54] for record in caplog.records] == [
        "ColocationProfile whole-cluster has no effect: spec: w",
        "ClusterColocationProfile lsr has no effect: spec.qosCl",
    ]  # fmt: skip
