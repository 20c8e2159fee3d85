"""Settings that map annotations to QoS levels and enhancements."""

from __future__ import annotations

import msgspec
import pytest

from agent.config.qos import QosConfig
from api.annotations import parse_enhancements
from api.qos import QoSLevel, explicit_qos_level


def test_settings_become_an_annotation_mapping() -> None:
    config = msgspec.convert(
        {
            "reclaimedSelector": {"tier": "offline"},
            "sharedSelector": {"tier": "online"},
            "enhancementKeys": {"katalyst.kubewharf.io/cpu_enhancement": "corp/cpu"},
            "enhancementDefaults": {"oom_priority": "50"},
            "numaIdsKey": "corp/nodes",
        },
        QosConfig,
    )
    dialect = config.dialect()
    assert explicit_qos_level({"tier": "offline"}, dialect.selectors) is QoSLevel.RECLAIMED
    annotations = {"corp/cpu": '{"cpuset_pool": "a"}', "corp/nodes": "1", "numa_binding": "true"}
    enhancements, problems = parse_enhancements(annotations, QoSLevel.SHARED, dialect)
    assert (enhancements.cpuset_pool, enhancements.numa_ids, enhancements.oom_priority, problems) == ("a", (1,), 50, ())
    assert parse_enhancements({}, QoSLevel.SHARED, QosConfig().dialect()) == parse_enhancements({}, QoSLevel.SHARED)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sharedSelector": {"a": "b"}, "systemSelector": {"a": "b"}}, "a: 'b' means both shared_cores and system_cores"),
        ({"enhancementDefaults": {"numa_binding": "yes"}}, "enhancementDefaults: numa_binding: 'yes' counts as"),
        ({"enhancementDefaults": {"x": "y"}}, "enhancementDefaults: x: there is no such enhancement; choose from"),
        ({"enhancementKeys": {"cpu": "y"}}, "enhancementKeys: 'cpu' is none of katalyst.kubewharf.io/memory_enh"),
        ({"numaIdsKey": "katalyst.kubewharf.io/numa_number"}, "is set for two settings; use a different one for each"),
        ({"numaIdsKey": ""}, "Expected `str` of length >= 1"),
        ({"selector": {}}, "unknown field `selector`"),
    ],
)  # fmt: skip
def test_invalid_settings_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(settings, QosConfig)
    assert message in str(caught.value)
