"""The page for those who do not look at it, do not point, or cannot bear movement."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests import fakes
from tests.browser.audit import AUDIT
from tests.browser.chromium import Browser
from tests.browser.reading import opened
from tests.cli import neighbours, story
from tests.cli.agent import Agent

pytestmark = pytest.mark.browser


def kinds(kind: str) -> tuple[Any, ...]:
    return {
        "pods": lambda: neighbours.rounds(40, more=30, waves=True),
        "nobody": lambda: neighbours.rounds(40, pods=(), hostile=True, waves=True),
        "empty": lambda: (fakes.bare_round(),),
    }[kind]()


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_the_last_numbers_of_an_agent_that_is_away_can_be_read(browser: Browser, agent: Agent, scheme: str) -> None:
    agent.show(kinds("pods"))
    page = opened(browser, agent, scheme=scheme)
    frame = "getComputedStyle(document.querySelector('main')).outlineStyle"
    assert page.eval(frame) == "none"
    agent.go_away()
    page.until("document.body.dataset.live === 'away'")
    assert page.eval(AUDIT) == []
    assert page.eval(frame) == "dashed"
    page.close()


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("kind", ["pods", "nobody", "empty"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_can_be_used_by_everybody(browser: Browser, agent: Agent, scheme: str, kind: str, width: int) -> None:
    agent.show(kinds(kind))
    page = opened(browser, agent, width, 900, scheme)
    page.eval("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.until("true")
    assert page.eval(AUDIT) == []
    assert page.eval("document.documentElement.scrollWidth") == width
    page.close()


def test_the_audit_finds_what_it_is_there_to_find(browser: Browser, agent: Agent) -> None:
    agent.show(kinds("pods"))
    page = opened(browser, agent)
    page.eval(
        """document.querySelector('footer').insertAdjacentHTML('beforeend',
        '<button></button><table id=t><tr><th>x</th></tr></table>' +
        '<h5>deep</h5><p class=pale id=act>pale</p><div id=veil><p class=faint>faint</p></div>' +
        '<svg></svg><a href=/ tabindex=3>first</a>')"""
    )
    page.eval("document.querySelector('.pale').style.color = getComputedStyle(document.body).backgroundColor")
    page.eval("document.querySelector('#veil').style.opacity = 0.5")
    found = page.eval(AUDIT)
    for what in ("id act twice", "h2 is followed by h5", "table#t has no caption", "has no scope: x", "button has no name",
                 "svg is neither hidden nor named", "has a place of its own", "p#act.pale in footer: 1.00",
                 "p.faint in div#veil: "):  # fmt: skip
        assert any(what in line for line in found), (what, found)


def test_tab_goes_through_the_page_in_its_order_and_is_seen(browser: Browser, agent: Agent) -> None:
    agent.show(kinds("pods"))
    page = opened(browser, agent)
    page.eval("document.querySelector('#main').focus()")
    seen: list[tuple[float, str]] = []
    for _ in range(60):
        page.press("Tab")
        place, what, outline = page.eval(
            """(() => { const a = document.activeElement, own = getComputedStyle(a);
            const beside = a.nextElementSibling ? getComputedStyle(a.nextElementSibling) : own;
            const order = [...document.querySelectorAll('*')].indexOf(a);
            const what = a.id || a.className || a.name || a.getAttribute('aria-label') || a.textContent;
            return [order, what, [own, beside].some(s => s.outlineStyle !== 'none')]; })()"""
        )
        if what == "" or (seen and place < seen[-1][0]):
            break
        assert outline, f"the focus on {what} is not seen"
        seen.append((place, what))
    stops = [what for _, what in seen]
    for stop in ("filter", "whose", "metric", "order", "heat-plot"):
        assert stop in stops
    assert stops.index("filter") < stops.index("heat-plot")
    assert [place for place, _ in seen] == sorted(place for place, _ in seen)


def test_nothing_moves_for_those_who_asked_for_that(browser: Browser, agent: Agent) -> None:
    agent.show(neighbours.rounds(10))
    page = opened(browser, agent)
    moving = page.eval(
        """[...document.querySelectorAll('*')].map(e => getComputedStyle(e))
        .filter(s => parseFloat(s.transitionDuration) > 0 || s.animationName !== 'none').length"""
    )
    assert moving == 0


def test_landmarks_and_names_for_readers(browser: Browser, agent: Agent, told: story.Story) -> None:
    agent.show(told.rounds)
    page = opened(browser, agent)
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles: dict[str, list[str]] = {}
    for node in nodes:
        roles.setdefault(node.get("role", {}).get("value", ""), []).append(node.get("name", {}).get("value", ""))
    assert len(roles["main"]) == 1
    assert {
        "Decisions",
        "Run-queue waits",
        "Who waits",
        "Who makes them wait",
        "Memory",
        "Threads by state",
        "Workloads",
        "Sources",
        "Verdict of the latest round",
    } <= set(roles["region"])
    assert all(name for role in ("slider", "searchbox", "combobox", "radio", "table") for name in roles.get(role, []))
    assert len(roles["slider"]) == 7
    heads = page.eval("[...document.querySelectorAll('h1, h2')].map(h => Number(h.tagName[1]))")
    assert all(b - a <= 1 for a, b in pairwise(heads))
