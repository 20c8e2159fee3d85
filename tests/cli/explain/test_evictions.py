"""Evictions in a terminal: one line of `dioptase top` while a threshold is met, and the reasons in `explain`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from click.testing import CliRunner

from api.decision import Cycle
from api.eviction import (
    EvictionEntry,
    EvictionEvent,
    EvictionEventReason,
    EvictionResult,
    EvictionThreshold,
    ThresholdMet,
)
from api.knobs import Reason
from cli.explain.answer import PodEvictions
from cli.explain.command import explain
from cli.explain.report import condition_text, eviction_text, threshold_text
from cli.top.frame import overview_lines
from cli.top.summary import notice_lines
from exporters.view.cycle_view import build_view
from exporters.view.decision_view import ThresholdView
from tests.builders.agent_server import AgentServer
from tests.builders.four_cpu_node import busy_cycle
from tests.builders.full_node import MEMORY_PLUGIN, RICH_EVICTIONS, RICH_KILLS

CALM = EvictionResult(thresholds=RICH_EVICTIONS.thresholds[1:2])


def cycle_with(seq: int, result: EvictionResult | None) -> Cycle:
    kills = RICH_KILLS if result is RICH_EVICTIONS else ()
    return msgspec.structs.replace(busy_cycle(seq), evictions=result, kills=kills)


def test_top_has_one_line_while_a_threshold_is_met() -> None:
    view = build_view(cycle_with(5, RICH_EVICTIONS))
    (line,) = notice_lines(view)
    assert line.plain == (
        f"✕ evictions: terminating: default/batch · default/needed is to be evicted, blocked (budget) · "
        f"hard {MEMORY_PLUGIN}: 64.0 MiB of memory are free; the watermark is 96.0 MiB. "
        "(and 1 more) · condition MemoryPressure"
    )
    shown = [row.plain for row in overview_lines(view, [view], (), 80, 24)]
    assert sum("evictions: terminating: default/batch" in row for row in shown) == 1
    assert all(len(row) <= 80 for row in shown)


@pytest.mark.parametrize("result", [None, CALM])
def test_top_has_no_line_while_no_threshold_is_met(result: EvictionResult | None) -> None:
    assert list(notice_lines(build_view(cycle_with(5, result)))) == []


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentServer]:
    server = AgentServer()
    server.show([cycle_with(1, RICH_EVICTIONS), cycle_with(2, CALM)])
    yield server
    server.close()


def explained(agent: AgentServer, *target: str) -> tuple[int, str]:
    done = CliRunner().invoke(explain, [*target, "--url", agent.url])
    return done.exit_code, " ".join(done.output.split())


def test_a_pod_is_explained_by_its_evictions(agent: AgentServer) -> None:
    code, text = explained(agent, "default/batch")
    assert code == 0
    assert "Evictions of default/batch evictions #3," in text
    assert f"it is evicted, with 1 s of grace period, by {MEMORY_PLUGIN}" in text
    assert "#1, " in text
    assert "EvictCreated: Successfully create eviction; reason: x" in text
    assert "because plugin met threshold: 64.0 MiB are free rule hard_threshold_met, threshold 100,663,296" in text
    assert f"inputs free_bytes {64 << 20:,} (from files of the node, up to 5 s old)" in text
    assert "default/stuck" not in text


def test_the_reason_of_an_eviction_is_printed_once() -> None:
    text = "plugin met threshold: 64.0 MiB are free"
    victim = EvictionEntry(seq=1, wall_time_ns=0, cycle_seq=1, victim=RICH_EVICTIONS.victims[0])
    kills = [
        EvictionEvent(pod="default/batch", reason=reason, message=f"{message}; reason: {text}", at_ns=1)
        for reason, message in ((EvictionEventReason.CREATED, "created"), (EvictionEventReason.SUCCEEDED, "it is gone"))
    ]
    entries = (
        *(EvictionEntry(seq=n, wall_time_ns=0, cycle_seq=2, kill=kill) for n, kill in enumerate(reversed(kills), 2)),
        victim,
    )
    result = list(eviction_text(PodEvictions(pod="default/batch", terminating=False, entries=entries), 10**9))
    assert [content.partition("ago: ")[2] for _, content in result[1:3]] == [
        "EvictSucceeded: it is gone",
        "EvictCreated: created",
    ]
    assert "\n".join(content for _, content in result).count(text) == 1


def test_bytes_of_a_threshold_have_their_unit() -> None:
    threshold = ThresholdView(
        plugin=MEMORY_PLUGIN, scope="SystemMemory", subject="free", met="hard", value=100 * 2.0**40, observed=93.5 * 2**30,
        operator="<", evaluated=True, text="t", rule="r", inputs={}, met_s=None, tolerance_s=0.0, dry_run=False,
    )  # fmt: skip
    assert ("observed", "93.50 GiB, met when < 100.00 TiB") in list(threshold_text(threshold))
    seconds = msgspec.structs.replace(threshold, subject="psi", value=60.0, observed=12.5)
    assert ("observed", "12.5, met when < 60") in list(threshold_text(seconds))


def test_a_dry_run_victim_is_marked(agent: AgentServer) -> None:
    assert "it would be evicted, but the plugin is in dry-run mode" in explained(agent, "web")[1]


def test_a_plugin_is_explained_by_its_thresholds(agent: AgentServer) -> None:
    code, text = explained(agent, MEMORY_PLUGIN)
    assert code == 0
    assert f"{MEMORY_PLUGIN}: not evaluated scope SystemMemory psi because memory pressure is not known" in text
    assert "Evictions of default/batch" in text


def test_a_threshold_is_explained_by_its_rule_and_inputs() -> None:
    headroom_input = "promised"
    inputs = {"requested": 12.0, headroom_input: 2.0, "factor": 5.0, "pods": 3}
    why = Reason(rule="hard_threshold_met", text="12 are requested.", threshold=10.0, inputs=inputs)
    threshold = EvictionThreshold(plugin="p", met=ThresholdMet.HARD, scope="cpu", value=10.0, observed=12.0, reason=why)
    view = build_view(cycle_with(5, EvictionResult(thresholds=(threshold,)))).evictions
    assert view is not None
    assert list(threshold_text(view.thresholds[0]))[3:] == [
        ("because", "12 are requested."),
        ("rule", "hard_threshold_met, threshold 10"),
        (
            "inputs",
            (
                f"requested 12 (from pods), {headroom_input} 2 (from the reported headroom), "
                "factor 5 (from the settings), pods 3 (from pods)"
            ),
        ),
    ]


def test_a_condition_is_explained_by_its_taint_and_its_end() -> None:
    """A taint outlives its cause by five minutes."""
    view = build_view(cycle_with(5, RICH_EVICTIONS)).evictions
    assert view is not None
    heading, *parts = condition_text(view.conditions[0])
    assert heading[1] == (
        "condition MemoryPressure: taint node.katalyst.kubewharf.io/MemoryPressure:NoSchedule of the Node"
    )
    texts = dict(parts)
    assert texts["cause"] == f"{MEMORY_PLUGIN}; its threshold was last met 4 s ago"
    assert texts["ends"].startswith("in 296 s unless the threshold is met again")


def test_an_unknown_target_lists_the_plugins(agent: AgentServer) -> None:
    code, text = explained(agent, "nobody")
    assert (code, f"plugins {MEMORY_PLUGIN}" in text) == (1, True)
