"""The page's list of decisions in a real browser: all of them, with their reasons and filters."""

from __future__ import annotations

import pytest

from cli import formats
from tests.browser.chromium import Browser, Page
from tests.browser.page_reader import opened
from tests.builders import colocation_run
from tests.builders.agent_server import AgentServer
from tests.builders.colocation_run import ColocationRun

pytestmark = pytest.mark.browser


def test_every_decision_is_listed_newest_first_with_its_reason(page: Page, reported: ColocationRun) -> None:
    page.until(f"document.querySelectorAll('.entry').length === {len(reported.entries)}")
    texts = page.eval("[...document.querySelectorAll('.entry summary')].map(e => e.textContent.replace(/\\s+/g, ' '))")
    for text, entry in zip(texts, reversed(reported.entries), strict=True):
        decision = entry.outcome.decision
        assert text.startswith(formats.clock(entry.wall_time_ns / 1e6))
        for part in (
            decision.pod,
            decision.knob.value,
            formats.knob_change(entry.outcome),
            "✓ applied",
            decision.reason.text,
        ):
            assert part in text
    marks = page.eval("document.querySelectorAll('#cpu-chart .mark').length")
    assert marks == len(reported.entries), "every write is a mark on the CPU chart"
    facts = page.eval("document.querySelector('.entry dl').textContent")
    for name, value in reported.entries[-1].outcome.decision.reason.inputs.items():
        assert name in facts
        assert isinstance(value, float) or ("unknown" if value is None else str(value)) in facts


def test_statuses_differ_by_word_sign_and_line_and_can_be_filtered(
    browser: Browser, agent: AgentServer, reported: ColocationRun
) -> None:
    agent.journal.all = list(colocation_run.with_every_status(reported))
    agent.show(reported.rounds)
    page = opened(browser, agent)
    looks = {}
    for status in ("applied", "dry-run", "refused", "vanished", "mismatch"):
        text, line, paint = page.eval(
            f"""(() => {{ const e = document.querySelector('[data-status="{status}"] .status'), s = getComputedStyle(e);
            return [e.textContent, s.borderTopStyle, s.backgroundColor]; }})()"""
        )
        assert text.endswith(status)
        looks[status] = (text[0], line, paint)
    assert len({sign for sign, _, _ in looks.values()}) == 5
    assert looks["applied"][1:] != looks["dry-run"][1:] != looks["refused"][1:]
    page.eval("document.querySelector('#status').value = 'refused'")
    page.eval("document.querySelector('#status').dispatchEvent(new Event('change'))")
    assert page.eval("[...document.querySelectorAll('.entry:not([hidden])')].map(e => e.dataset.status)") == ["refused"]
    assert page.text("#decisions-count") == f"1 of {len(agent.journal.all)}"
    page.eval("document.querySelector('#find').value = 'no such thing'")
    page.eval("document.querySelector('#find').dispatchEvent(new Event('input'))")
    assert page.text("#no-entries") == "No decision matches this filter."
