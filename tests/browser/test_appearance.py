"""What the page looks like: it fits every width, and its colours are readable and distinguishable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import dist

import pytest

from api.pod import Pod
from tests.browser.chromium import Browser, Page
from tests.browser.page_reader import opened
from tests.builders import colocation_run, interference_node
from tests.builders.agent_server import AgentServer
from tests.builders.colocation_run import ColocationRun

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [320, 400, 768, 1280])
def test_nothing_scrolls_sideways(browser: Browser, agent: AgentServer, width: int, scheme: str) -> None:
    long = colocation_run.simulate_run(
        30, others=(colocation_run.LONG, colocation_run.HOSTILE), startup_warnings=("x" * 300,)
    )
    agent.journal.all = list(colocation_run.with_every_status(long))
    agent.show(long.rounds)
    page = opened(browser, agent, width, 800, scheme)
    assert page.eval("document.documentElement.scrollWidth") == width
    clipped = page.eval(
        """[...document.querySelectorAll('header *, #verdict *, .tile b, .pill')]
        .filter(e => e.getBoundingClientRect().right > innerWidth).length"""
    )
    assert clipped == 0
    page.close()


@pytest.mark.parametrize("pods", [(), interference_node.PODS], ids=["watched only", "with pods"])
@pytest.mark.parametrize("width", [400, 1000, 1280])
def test_no_panel_lies_over_another(browser: Browser, agent: AgentServer, width: int, pods: tuple[Pod, ...]) -> None:
    """Nor does what a panel holds reach out of it: a height that was made for a wide screen would let it."""
    agent.show(interference_node.interference_cycles(40, pods=pods))
    page = opened(browser, agent, width, 900)
    overlaps = page.eval(
        """(() => { const boxes = [...document.querySelectorAll('.tile, .panel, #verdict')].filter(e => e.offsetParent)
        .map(e => [e.getAttribute('aria-label') ?? e.textContent.slice(0, 20), e.getBoundingClientRect()]);
        return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([, q]) => p.left < q.right - 1 && q.left < p.right - 1
        && p.top < q.bottom - 1 && q.top < p.bottom - 1).map(([b]) => `${a} / ${b}`)); })()"""
    )
    assert overlaps == []
    outside = page.eval(
        """[...document.querySelectorAll('.core > .panel')].filter(e => e.offsetParent).flatMap(panel =>
        [...panel.querySelectorAll('figure, table')].filter(e => e.offsetParent && (e.getBoundingClientRect().bottom >
        panel.getBoundingClientRect().bottom || e.getBoundingClientRect().height < 60)).map(e => e.id))"""
    )
    assert outside == []
    page.close()


@pytest.mark.parametrize("width", [400, 1000, 1181, 1280])
def test_no_text_of_a_tile_is_cut(browser: Browser, agent: AgentServer, reported: ColocationRun, width: int) -> None:
    """Names of pods and cgroups may be of any length, and are cut."""
    for rounds in (
        interference_node.interference_cycles(40, pods=()),
        interference_node.interference_cycles(40),
        reported.rounds,
    ):
        agent.go_away()
        agent.start()
        agent.show(rounds)
        page = opened(browser, agent, width, 900)
        cut = page.eval(
            """[...document.querySelectorAll('.tile dt, .tile .note:not([id$=-who])')]
            .filter(e => e.offsetParent && e.scrollWidth > e.clientWidth).map(e => e.textContent)"""
        )
        assert cut == []
        page.close()


def test_the_core_fits_a_laptop_screen(browser: Browser, agent: AgentServer, reported: ColocationRun) -> None:
    agent.show(reported.rounds)
    page = opened(browser, agent, 1366, 650)
    assert page.eval("document.querySelector('.core').getBoundingClientRect().bottom <= innerHeight")


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SIGHTS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long cones": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no middle cones": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "no short cones": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))


WHITE = (0.95047, 1.0, 1.08883)


Matrix = Sequence[Sequence[float]]


def linear(color: str) -> list[float]:
    """Linear RGB of `#rrggbb`."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def sumprod(item: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(item, other, strict=True))


def times(matrix: Matrix, vector: Sequence[float]) -> list[float]:
    return [min(max(sumprod(row, vector), 0.0), 1.1) for row in matrix]


def lab(color: str, sight: Matrix) -> tuple[float, float, float]:
    """CIELAB of a colour as an eye of that kind sees it."""
    x, y, z = (value / white for value, white in zip(times(XYZ, times(sight, linear(color))), WHITE, strict=True))
    fx, fy, fz = (t ** (1 / 3) if t > 216 / 24389 else t * 24389 / 3132 + 4 / 29 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def luminance(color: str) -> float:
    return times(XYZ, linear(color))[1]


def contrast(item: str, other: str) -> float:
    """WCAG 2's ratio, 1 to 21."""
    low, high = sorted((luminance(item), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def palette(page: Page, *names: str) -> dict[str, str]:
    values = page.eval(
        f"{json.dumps(names)}.map(n => getComputedStyle(document.documentElement).getPropertyValue('--' + n).trim())"
    )
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_colours_can_be_read(browser: Browser, agent: AgentServer, scheme: str) -> None:
    """Everything in these colours is, somewhere, text: 4.5 to 1 on all that it may stand on."""
    page = browser.page(scheme=scheme)
    page.go(agent.url)
    inks = ("text", "dim", "online", "batch", "rest", "lent", "wait", "good", "bad", "warn", "brand")
    grounds = ("panel", "raised", "ground")
    colors = palette(page, *inks, *grounds)
    actual = {(ink, ground): contrast(colors[ink], colors[ground]) for ink in inks for ground in grounds}
    assert {pair: round(ratio, 2) for pair, ratio in actual.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("sight", list(SIGHTS))
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_colours_that_meet_differ_for_every_eye(browser: Browser, agent: AgentServer, scheme: str, sight: str) -> None:
    """A distance of 20 in CIELAB is two clearly different colours side by side."""
    page = browser.page(scheme=scheme)
    page.go(agent.url)
    colors = palette(page, "online", "batch", "rest", "wait")
    for item, other in (("online", "batch"), ("online", "rest"), ("batch", "rest"), ("online", "wait")):
        distance = dist(lab(colors[item], SIGHTS[sight]), lab(colors[other], SIGHTS[sight]))
        assert distance > 20, (item, other, distance)
