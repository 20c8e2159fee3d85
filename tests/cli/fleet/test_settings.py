"""Settings of nodes side by side: different values, different sources, and nodes that did not answer."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from api.diagnostics import AppliedConfigObject, EffectiveConfiguration, EffectiveSetting
from cli.fleet.agent_endpoints import AgentEndpoint
from cli.fleet.api_server import AgentReply, ApiServerOptions
from cli.fleet.settings import compare_settings, settings_lines
from cli.kubectl import kubectl

S = 1_000_000_000
ALL = {"source": "AdminQoSConfiguration", "object": "kube-system/all", "hash": "h1", "field": "spec.x"}


def node(
    name: str, *settings: EffectiveSetting, objects: tuple[AppliedConfigObject, ...] = (), problem: str = ""
) -> AgentReply[EffectiveConfiguration]:
    return AgentReply(
        AgentEndpoint(node=name), EffectiveConfiguration(settings=settings, objects=objects, problem=problem)
    )


def setting(name: str, value: str, source: str = "default", **other: str) -> EffectiveSetting:
    return EffectiveSetting(name=name, value=value, source=source, **other)  # type: ignore[arg-type]


def shown(
    *configuration: AgentReply[EffectiveConfiguration], names: tuple[str, ...] = (), differing: bool = False
) -> list[str]:
    return list(settings_lines(compare_settings(configuration, names, differing=differing), 0, differing=differing))


def test_where_all_agree_there_is_one_line() -> None:
    assert shown(node("n1", setting("intervalS", "1")), node("n2", setting("intervalS", "1"))) == [
        "intervalS  1  (default)"
    ]


def test_each_differing_value_has_its_nodes_the_most_frequent_first() -> None:
    text = (
        node("n1", EffectiveSetting(name="a.b", value="false", **ALL)),
        node("n2", setting("a.b", "true")),
        node("n3", setting("a.b", "true")),
    )
    assert shown(*text) == [
        "a.b  differs:",
        "  true  (default)  on n2, n3",
        "  false  (AdminQoSConfiguration kube-system/all h1: spec.x)  on n1",
    ]


def test_the_same_value_from_another_source_does_not_differ() -> None:
    text = (node("n1", setting("a.b", "1")), node("n2", setting("a.b", "1", "file")))
    assert shown(*text)[0] == "a.b  the same from different sources:"
    assert shown(*text, differing=True) == ["no setting differs: 2 nodes answered"]
    assert shown(text[0], node("n3", setting("a.b", "2")), differing=True)[0] == "a.b  differs:"


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ApiServerOptions, "ask", lambda *_: [node("n1", setting("a.b", "1"))])
    done = CliRunner().invoke(kubectl, ["config", "--differing", "a.x"])
    assert (done.exit_code, "there is no setting 'a.x'" in done.output) == (2, True)
    done = CliRunner().invoke(kubectl, ["config", "--differing", "a"])
    assert (done.exit_code, done.output) == (0, "no setting differs: 1 node answered\n")


def test_without_answers_no_setting_is_compared() -> None:
    silent: AgentReply[EffectiveConfiguration] = AgentReply(AgentEndpoint(node="n1"), None, "gone")
    assert shown(silent, differing=True) == ["✕ n1: gone"]
    assert shown(silent, node("n2", setting("a.b", "1")), differing=True) == [
        "no setting differs: 1 node answered", "✕ n1: gone",
    ]  # fmt: skip


def test_a_setting_that_another_version_lacks_differs() -> None:
    fleet = compare_settings([node("n1", setting("new", "1"), setting("old", "2")), node("n2", setting("old", "2"))])
    assert [(item.name, item.differs) for item in fleet.settings] == [("new", True), ("old", False)]


def test_only_the_named_group_is_listed() -> None:
    text = node("n1", setting("a.b", "1"), setting("a.bc", "2"), setting("a.b.c", "3"))
    assert [line.split()[0] for line in shown(text, names=("a.b",))] == ["a.b", "a.b.c"]


def test_objects_are_grouped_by_content_and_state() -> None:
    def thing(digest: str, since: int | None, problem: str = "") -> AppliedConfigObject:
        return AppliedConfigObject(kind="K", object="ns/all", hash=digest, since_wall_ns=since, problem=problem)

    text = (
        node("n1", objects=(thing("h1", 5 * S),)),
        node("n2", objects=(thing("h1", 9 * S),)),
        node("n3", objects=(thing("h2", None, "spec.x: too large"),)),
        node("n4", objects=(thing("h3", None),)),
    )
    lines = shown(*text)
    assert lines[0].startswith("K ns/all h1 applies since ")
    assert lines[0].endswith(":09  on n1, n2"), "since all of them have"
    assert lines[1:] == ["K ns/all h2 cannot be applied: spec.x: too large  on n3"]


def test_nodes_without_answer_and_without_changes_are_listed() -> None:
    silent: AgentReply[EffectiveConfiguration] = AgentReply(AgentEndpoint(node="n1"), None, "gone")
    assert shown(silent, node("n2", problem="refused")) == ["✕ n1: gone", "✕ n2: no changes are received: refused"]
    assert compare_settings([silent]).nodes == ()
