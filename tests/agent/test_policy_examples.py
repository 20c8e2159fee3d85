"""Every example of docs/policies.md is valid and changes the decisions of the agent."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from agent.config.config import AgentConfig
from agent.sensors.pods.pod_spec import PodFieldPaths, PodParsingContext, RawPod, pod_from_spec
from api.annotations import IndicatorTarget
from tests.builders.settings import parse_config

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs/policies.md").read_text()
SECTIONS = {
    title.strip("`"): re.findall(r"^```yaml\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
EXAMPLES = [(title, text) for title, texts in SECTIONS.items() for text in texts if "metadata:" not in text]


def test_every_policy_has_an_example_and_is_linked_from_the_table() -> None:
    assert len(EXAMPLES) == len(SECTIONS) == 13
    anchors = {re.sub(r"[^a-z- ]", "", title.lower()).replace(" ", "-") for title in SECTIONS}
    assert set(re.findall(r"\(#([a-z-]+)\)", PAGE)) == anchors


@pytest.mark.parametrize(("title", "text"), EXAMPLES)
def test_an_example_is_valid_and_changes_decisions(title: str, text: str) -> None:
    config = parse_config(text.encode(), title)
    # `latency` and what follows from it is what the agent does anyway; its example has a lower target.
    assert config != AgentConfig()


def test_the_example_pod_is_parsed_as_documented() -> None:
    (example,) = (text for text in SECTIONS["rama"] if "metadata:" in text)
    annotations = msgspec.yaml.decode(example)["metadata"]["annotations"]
    raw = msgspec.convert({"name": "web", "containers": [{"cgroup": "/web"}], "annotations": annotations}, RawPod)
    pod = pod_from_spec(raw, PodFieldPaths(metadata="pods[0]", spec="pods[0]"), PodParsingContext())
    assert pod.problems == ()
    assert pod.profile.targets == {
        "request_p99_ms": IndicatorTarget(upper=20),
        "cpu_usage_ratio": IndicatorTarget(upper=0.6),
    }
    assert pod.profile.reclaimable


@pytest.mark.parametrize(
    ("text", "problem", "level"),
    [
        ('{"memoryOffloading": {"enable": "yes"}}', "memoryOffloading: Expected `bool | null`", ""),
        ('{"disableReclaimLevel": "Rack"}', "Invalid enum value 'Rack'", "Pod"),
        ("upper: 20", "JSON is malformed", "Pod"),
    ],
)
def test_an_invalid_profile_is_a_problem_of_its_pod(text: str, problem: str, level: str) -> None:
    annotations = {"dioptase.io/service-profile": text}
    raw = msgspec.convert({"name": "web", "containers": [{"cgroup": "/web"}], "annotations": annotations}, RawPod)
    pod = pod_from_spec(raw, PodFieldPaths(metadata="pods[0]", spec="pods[0]"), PodParsingContext())
    (reported,) = pod.problems
    assert reported.startswith("annotation dioptase.io/service-profile: ")
    assert problem in reported
    assert (pod.profile.disable_reclaim_level, pod.profile.memory_offloading) == (level, {})
