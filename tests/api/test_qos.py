"""QoS levels and enhancements: every key, format, default, bound and error that Katalyst documents."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.annotations import (
    OOM_PRIORITY_BOUNDS,
    RSS_THRESHOLD_UNREACHABLE,
    parse_enhancements,
    parse_numa_bind_result,
    validate_default_enhancement,
)
from api.qos import (
    CPU_KEY,
    MEMORY_KEY,
    NETWORK_KEY,
    NUMA_BIND_RESULT_KEY,
    NUMA_IDS_KEY,
    NUMA_NUMBER_KEY,
    QOS_LEVEL_KEY,
    AnnotationMapping,
    BurstPolicy,
    Enhancements,
    QoSLevel,
    explicit_qos_level,
)

SHARED, DEDICATED, RECLAIMED, SYSTEM = QoSLevel
TIER = {RECLAIMED: {"tier": "offline"}, SHARED: {"tier": "online"}}
NAMES = (
    "numa_binding", "numa_exclusive", "rss_overuse_threshold", "oom_priority", "cpuset_pool", "numa_share",
    "suppression_tolerance_rate", "cpu_burst_policy", "cpu_burst_percent", "cpu_burst_threshold", "align_by_socket",
    "distribute_evenly_across_numa", "full_pcpus_pairing", "namespace_type", "topology_affinity_restricted",
)  # fmt: skip


@pytest.mark.parametrize(
    ("annotations", "level"),
    [
        ({}, None),
        ({"tier": "offline"}, RECLAIMED),
        ({"tier": "online"}, SHARED),
        ({QOS_LEVEL_KEY: "system_cores"}, SYSTEM),
        ({QOS_LEVEL_KEY: "reclaimed_cores", "tier": "offline"}, RECLAIMED),
        ({"other": "offline"}, None),
    ],
)
def test_levels_are_stated_by_katalysts_annotation_or_a_selector(annotations: dict[str, str], level: QoSLevel) -> None:
    assert explicit_qos_level(annotations, TIER) is level


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ({QOS_LEVEL_KEY: ""}, f"annotation {QOS_LEVEL_KEY}: '' is not a QoS level; use one of shared_cores, dedicated_c"),
        ({QOS_LEVEL_KEY: "Shared_cores"}, "'Shared_cores' is not a QoS level"),
        ({"tier": "midline"}, "annotation tier: 'midline' is not a QoS level; use one of online, offline"),
        ({QOS_LEVEL_KEY: "shared_cores", "tier": "offline"}, "annotation tier: 'offline' contradicts katalyst.kubewharf.io"),
        ({QOS_LEVEL_KEY: "best", "tier": "offline"}, f"annotation {QOS_LEVEL_KEY}: 'best' contradicts tier, which says recl"),
    ],
)  # fmt: skip
def test_unknown_levels_and_contradictions_are_errors(annotations: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match="annotation ") as caught:
        explicit_qos_level(annotations, TIER)
    assert message in str(caught.value)


def test_selectors_of_two_levels_contradict_each_other_whatever_their_order() -> None:
    selectors = {SYSTEM: {"daemon": "yes"}, RECLAIMED: {"batch": "yes"}}
    with pytest.raises(ValueError, match="batch says reclaimed_cores and daemon says system_cores; remove one"):
        explicit_qos_level({"batch": "yes", "daemon": "yes"}, selectors)
    assert explicit_qos_level({"batch": "no", "daemon": "yes"}, selectors) is SYSTEM
    assert explicit_qos_level({"batch": "no"}, selectors) is None, (
        "of another level than the default it says: not that one"
    )


def memory(**values: Any) -> dict[str, str]:
    return {MEMORY_KEY: json.dumps(values)}


def cpu(**values: Any) -> dict[str, str]:
    return {CPU_KEY: json.dumps(values)}


def network(**values: Any) -> dict[str, str]:
    return {NETWORK_KEY: json.dumps(values)}


BOUND = {MEMORY_KEY: '{"numa_binding": "true"}'}


@pytest.mark.parametrize(
    ("level", "annotations", "field", "value"),
    [
        (SHARED, BOUND, "numa_binding", True),
        (RECLAIMED, BOUND, "numa_binding", True),
        (SHARED, memory(numa_binding="false"), "numa_binding", False),
        (DEDICATED, memory(numa_binding="true", numa_exclusive="true"), "numa_exclusive", True),
        (SHARED, memory(rss_overuse_threshold="1.05"), "rss_overuse_threshold", 1.05),
        (SYSTEM, memory(rss_overuse_threshold="1e-1"), "rss_overuse_threshold", 0.1),
        (SHARED, {}, "rss_overuse_threshold", None),
        (RECLAIMED, {}, "oom_priority", -100), (SHARED, {}, "oom_priority", 0), (SYSTEM, {}, "oom_priority", 200),
        (DEDICATED, BOUND, "oom_priority", 100),
        (RECLAIMED, memory(oom_priority="-1"), "oom_priority", -1),
        (SHARED, memory(oom_priority="+99"), "oom_priority", 99),
        (SYSTEM, memory(oom_priority="299"), "oom_priority", 299),
        (RECLAIMED, memory(oom_priority="300"), "oom_priority", 300),
        (SHARED, memory(oom_priority="300"), "oom_priority", 300),
        (RECLAIMED, memory(oom_priority="-300"), "oom_priority", -100),
        (SYSTEM, memory(oom_priority="-300"), "oom_priority", 200),
        (SHARED, cpu(cpuset_pool="batch"), "cpuset_pool", "batch"),
        (SYSTEM, cpu(cpuset_pool="reserve"), "cpuset_pool", "reserve"),
        (SYSTEM, cpu(cpuset_pool="system-a"), "cpuset_pool", "system-a"),
        (SHARED, cpu(numa_share="false"), "numa_share", False), (SHARED, {}, "numa_share", True),
        (RECLAIMED, cpu(suppression_tolerance_rate="1.5"), "suppression_tolerance_rate", 1.5),
        (RECLAIMED, cpu(suppression_tolerance_rate="0"), "suppression_tolerance_rate", 0.0),
        (RECLAIMED, {}, "suppression_tolerance_rate", None),
        (SHARED, cpu(cpu_burst_policy="closed"), "burst_policy", BurstPolicy.CLOSED),
        (SHARED, cpu(cpu_burst_policy="static"), "burst_policy", BurstPolicy.STATIC),
        (SHARED, cpu(cpu_burst_policy="dynamic"), "burst_policy", BurstPolicy.DYNAMIC),
        (SHARED, {}, "burst_policy", BurstPolicy.DEFAULT),
        (SHARED, cpu(cpu_burst_percent="0"), "burst_percent", 0.0),
        (SHARED, cpu(cpu_burst_percent="33.5"), "burst_percent", 33.5), (SHARED, {}, "burst_percent", None),
        (SHARED, cpu(align_by_socket="true"), "align_by_socket", True),
        (SHARED, cpu(distribute_evenly_across_numa="true"), "distribute_evenly", True),
        (SHARED, cpu(full_pcpus_pairing="true"), "full_cores", True),
        (SHARED, {**BOUND, NUMA_NUMBER_KEY: "2"}, "numa_number", 2),
        (SHARED, {**BOUND, NUMA_IDS_KEY: "0-1,3"}, "numa_ids", (0, 1, 3)),
        (SHARED, {"numa_binding": "true"}, "numa_binding", True),
        (SHARED, {"cpuset_pool": "flat", **cpu(cpuset_pool="object")}, "cpuset_pool", "object"),
        (SHARED, {CPU_KEY: "{}"}, "burst_policy", BurstPolicy.DEFAULT),
    ],
)  # fmt: skip
def test_enhancements_are_read(level: QoSLevel, annotations: dict[str, str], field: str, value: object) -> None:
    parsed, problems = parse_enhancements(annotations, level)
    assert getattr(parsed, field) == value
    assert problems == ()


@pytest.mark.parametrize(
    ("level", "annotations", "field", "value", "problem"),
    [
        (SHARED, {MEMORY_KEY: '{"numa_binding": true, "oom_priority": "5"}'}, "oom_priority", 0,
         f"annotation {MEMORY_KEY}: 'numa_binding': true is not text; write \"true\"; until then all of it is ignored"),
        (SHARED, {CPU_KEY: '{"cpu_burst_percent": 50}'}, "burst_percent", None, '50 is not text; write "50"; until then'),
        (SHARED, {CPU_KEY: '{"a": null}'}, "burst_percent", None, "null is not text; write text in quotes; until then all"),
        (SHARED, {CPU_KEY: "[]"}, "cpuset_pool", "", f"annotation {CPU_KEY}: '[]' is no JSON object; write it like"),
        (SHARED, {CPU_KEY: ""}, "cpuset_pool", "", f"annotation {CPU_KEY}: '' is not JSON; write it like '{{"),
        (SHARED, {CPU_KEY: "{cpuset_pool: x}"}, "cpuset_pool", "", "is not JSON; write it like"),
        (SHARED, cpu(cpusetpool="x"), "cpuset_pool", "", f"annotation {CPU_KEY}: 'cpusetpool' is no enhancement of it; use"),
        (SHARED, cpu(numa_binding="true"), "numa_binding", True, f"numa_binding: belongs in {MEMORY_KEY}; write it there"),
        (SHARED, memory(numa_binding="yes"), "numa_binding", False, "'yes' counts as \"false\"; write \"true\" or \"false\""),
        (SHARED, cpu(numa_share="no"), "numa_share", True, "'no' counts as \"true\"; write"),
        (SHARED, memory(numa_exclusive="true"), "numa_exclusive", False, "is for dedicated_cores only, this pod has shared"),
        (DEDICATED, memory(numa_exclusive="true"), "numa_exclusive", False, "numa_binding: is missing: dedicated_cores pods"),
        (DEDICATED, {}, "numa_binding", False, f"annotation {MEMORY_KEY}: numa_binding: is missing: dedicated_cores pods"),
        (SYSTEM, BOUND, "numa_binding", False, "is for shared_cores and dedicated_cores and reclaimed_cores only"),
        (SHARED, memory(rss_overuse_threshold="0"), "rss_overuse_threshold", RSS_THRESHOLD_UNREACHABLE,
         "'0' is no number above 0"),
        (SHARED, memory(rss_overuse_threshold="-1"), "rss_overuse_threshold", RSS_THRESHOLD_UNREACHABLE,
         "is no number above 0; write one"),
        (SHARED, memory(rss_overuse_threshold="inf"), "rss_overuse_threshold", RSS_THRESHOLD_UNREACHABLE,
         "until then the pod is never"),
        (SHARED, memory(oom_priority="100"), "oom_priority", 99,
         "100 is outside of 0 to 99, the range of shared_cores; it counts as"),
        (RECLAIMED, memory(oom_priority="0"), "oom_priority", -1, "0 is outside of -100 to -1"),
        (RECLAIMED, memory(oom_priority="-101"), "oom_priority", -100, "-101 is outside of -100 to -1"),
        (DEDICATED, memory(numa_binding="true", oom_priority="99"), "oom_priority", 100, "99 is outside of 100 to 199"),
        (DEDICATED, memory(numa_binding="true", oom_priority="200"), "oom_priority", 199, "200 is outside of 100 to 199"),
        (SYSTEM, memory(oom_priority="301"), "oom_priority", 299, "301 is outside of 200 to 299"),
        (SYSTEM, memory(oom_priority="-299"), "oom_priority", 200, "-299 is outside of 200 to 299"),
        (SHARED, memory(oom_priority="1.5"), "oom_priority", 0, "'1.5' is no whole number; write one from 0 to 99"),
        (RECLAIMED, cpu(cpuset_pool="x"), "cpuset_pool", "", "cpuset_pool: is for shared_cores and system_cores only"),
        (SHARED, cpu(cpuset_pool="reclaim"), "cpuset_pool", "", "'reclaim' is a pool that the agent creates itself; choose"),
        (SHARED, cpu(cpuset_pool="share-NUMA1"), "cpuset_pool", "", "'share-NUMA1' is a pool that the agent creates"),
        (SHARED, cpu(cpuset_pool="system-a"), "cpuset_pool", "", "'system-a' is a pool that the agent creates itself"),
        (SYSTEM, cpu(cpuset_pool="interrupt"), "cpuset_pool", "", "'interrupt' is a pool that the agent creates itself"),
        (SHARED, cpu(cpuset_pool="a/b"), "cpuset_pool", "", "'a/b' is no name of a pool; use letters"),
        (SHARED, cpu(suppression_tolerance_rate="1"), "suppression_tolerance_rate", None, "is for reclaimed_cores only"),
        (RECLAIMED, cpu(suppression_tolerance_rate="x"), "suppression_tolerance_rate", None, "'x' is no number; write one"),
        (RECLAIMED, cpu(cpu_burst_policy="static"), "burst_policy", BurstPolicy.DEFAULT, "is for shared_cores and dedica"),
        (SHARED, cpu(cpu_burst_policy="auto"), "burst_policy", BurstPolicy.DEFAULT, "'auto' is no policy; use one of default"),
        (SHARED, cpu(cpu_burst_percent="101"), "burst_percent", 100.0, "'101' is more than 100, and counts as 100"),
        (SHARED, cpu(cpu_burst_percent="-1"), "burst_percent", None, "'-1' is no percentage; write a number from 0 to 100"),
        (SHARED, cpu(cpu_burst_threshold="3"), "burst_percent", None, "has no effect, here or in Katalyst; remove it"),
        (SHARED, network(namespace_type="host_ns"), "numa_share", True, "namespace_type: has no effect here: a pod gets the"),
        (SHARED, network(topology_affinity_restricted="true"), "numa_share", True, "restricted: has no effect here: a pod"),
        (SHARED, {**BOUND, NUMA_NUMBER_KEY: "0"}, "numa_number", None, f"annotation {NUMA_NUMBER_KEY}: '0' is no number of"),
        (SHARED, {**BOUND, NUMA_IDS_KEY: ""}, "numa_ids", None, f"annotation {NUMA_IDS_KEY}: '' is no list of NUMA nodes"),
        (SHARED, {**BOUND, NUMA_IDS_KEY: "1-0"}, "numa_ids", None, "'1-0' is no list of NUMA nodes; write one such as"),
        (SHARED, {NUMA_IDS_KEY: "0"}, "numa_ids", None, f"annotation {NUMA_IDS_KEY}: has no effect without numa_binding"),
        (SHARED, {**BOUND, NUMA_IDS_KEY: "0", NUMA_NUMBER_KEY: "2"}, "numa_ids", (0,), "names 1 nodes, numa_number says 2"),
        (SHARED, {**BOUND, NUMA_IDS_KEY: "0-2"}, "numa_ids", (0, 1, 2), "this machine has no NUMA node 2; name others"),
        (SHARED, {**BOUND, NUMA_NUMBER_KEY: "3"}, "numa_number", 3, "this machine has 2 NUMA nodes, not 3; ask for fewer"),
    ],
)  # fmt: skip
def test_invalid_enhancements_are_dropped_and_reported(
    level: QoSLevel, annotations: dict[str, str], field: str, value: object, problem: str
) -> None:
    parsed, problems = parse_enhancements(annotations, level, numa_nodes=(0, 1))
    assert getattr(parsed, field) == value
    assert len(problems) == 1
    assert problem in problems[0]


def test_other_keys_and_defaults_of_a_cluster() -> None:
    mapping = AnnotationMapping(
        renamed={MEMORY_KEY: "corp/memory"},
        defaults={
            "numa_binding": "true",
            "oom_priority": "500",
            "cpuset_pool": "corp",
            "numa_number": "1",
            "none": "x",
        },
        numa_ids_key="corp/nodes",
    )
    parsed, problems = parse_enhancements({"corp/memory": '{"oom_priority": "7"}', "corp/nodes": "1"}, SHARED, mapping)
    assert (parsed.numa_binding, parsed.oom_priority, parsed.cpuset_pool, problems) == (True, 7, "corp", ())
    assert (parsed.numa_ids, parsed.numa_number) == ((1,), 1)
    parsed, problems = parse_enhancements({"corp/memory": "{}", **memory(numa_binding="false")}, RECLAIMED, mapping)
    assert (parsed.numa_binding, parsed.oom_priority, parsed.cpuset_pool) == (False, -1, "")
    assert (parsed.numa_number, problems) == (None, ())
    assert parse_enhancements({}, SYSTEM, mapping)[0] == Enhancements(
        numa_binding=False, oom_priority=299, cpuset_pool="corp"
    )


@pytest.mark.parametrize(
    ("text", "nodes", "problem"),
    [(None, (), ""), ("-1", (), ""), ("1", (1,), ""), (" 0 ", (0,), ""), ("0-1", (0, 1), ""),
     ("one", (), f"annotation {NUMA_BIND_RESULT_KEY}: 'one' is no list of NUMA nodes; write one such as 0")],
)  # fmt: skip
def test_the_numa_node_that_was_chosen(text: str | None, nodes: tuple[int, ...], problem: str) -> None:
    parsed, problems = parse_numa_bind_result({} if text is None else {NUMA_BIND_RESULT_KEY: text})
    assert parsed == nodes
    assert "".join(problems).startswith(problem)
    assert bool(problems) is bool(problem)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [("numa_binding", "true", ""), ("oom_priority", "-5", ""), ("numa_binding", "1", "'1' counts as"),
     ("oom_priority", "x", "'x' is no whole number"), ("numa", "1", "there is no such enhancement; choose from numa_bind")],
)  # fmt: skip
def test_defaults_are_validated(name: str, text: str, problem: str) -> None:
    assert validate_default_enhancement(name, text).startswith(problem)
    assert bool(validate_default_enhancement(name, text)) is bool(problem)


json_texts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)
).map(json.dumps)
objects = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=9), st.text(max_size=9)).map(json.dumps)
keys = st.sampled_from(
    (QOS_LEVEL_KEY, MEMORY_KEY, CPU_KEY, NETWORK_KEY, NUMA_NUMBER_KEY, NUMA_IDS_KEY, NUMA_BIND_RESULT_KEY, *NAMES)
)
numbers = st.integers().map(str) | st.floats().map(str) | st.text("0123456789-,. eE+", max_size=8)


@given(st.dictionaries(keys, st.text() | numbers | json_texts | objects), st.sampled_from(QoSLevel))
def test_no_text_raises_or_leaves_its_bounds(annotations: dict[str, str], level: QoSLevel) -> None:
    parsed, problems = parse_enhancements(annotations, level, numa_nodes=(0,))
    low, high = OOM_PRIORITY_BOUNDS[level]
    assert low <= parsed.oom_priority <= high or parsed.oom_priority == 300
    assert parsed.burst_percent is None or 0 <= parsed.burst_percent <= 100
    assert parsed.rss_overuse_threshold is None or parsed.rss_overuse_threshold > 0
    assert not parsed.numa_exclusive or (parsed.numa_binding and level is DEDICATED)
    assert parsed.numa_binding or (parsed.numa_ids is None and parsed.numa_number is None)
    assert msgspec.json.decode(msgspec.json.encode(parsed), type=Enhancements) == parsed
    assert all(len(problem) < 600 for problem in problems)
    parse_numa_bind_result(annotations)
    try:
        outcome = str(explicit_qos_level(annotations, TIER))
    except ValueError as error:
        outcome = str(error)
    assert outcome == "None" or outcome in [*QoSLevel] or outcome.startswith("annotation ")
