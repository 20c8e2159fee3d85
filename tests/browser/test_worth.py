"""What the page says of gain and harm, and how it names, repeats and folds things, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest

from api.decision import ActMode, Cycle, JournalEntry
from api.pod import Container, Pod
from api.qos import QoSLevel
from cli import formats
from tests.browser.chromium import Browser, Page
from tests.browser.page_reader import heat_rows, opened, rows
from tests.builders.agent_server import AgentServer
from tests.builders.four_cpu_node import advice, busy_cycle, outcome
from tests.builders.full_node import RICH_TOTALS
from tests.builders.interference_node import BATCH as BATCH_CGROUP
from tests.builders.interference_node import WEB, interference_cycles
from tests.builders.interference_node import cgroup as sample

pytestmark = pytest.mark.browser
NODE = "ip-10-0-42-17.compute.internal"


@pytest.fixture
def agent() -> Iterator[AgentServer]:
    created = AgentServer(node_name=NODE)
    yield created
    created.close()


def harmed(ratio: float = 1.0, totals: object = RICH_TOTALS) -> list[Cycle]:
    """A node that acts, holds, and whose online pod waits 240 ms a second, or this part of it, for /batch."""
    cycles: list[Cycle] = []
    for cycle in interference_cycles(4):
        cgroups = dict(cycle.snapshot.cgroups)
        web = cgroups[WEB]
        assert web.blame is not None
        by_cgroup = {**web.blame.by_cgroup, BATCH_CGROUP: int(web.blame.by_cgroup[BATCH_CGROUP] * ratio)}
        cgroups[WEB] = msgspec.structs.replace(web, blame=msgspec.structs.replace(web.blame, by_cgroup=by_cgroup))
        cycles.append(
            msgspec.structs.replace(
                cycle, snapshot=msgspec.structs.replace(cycle.snapshot, cgroups=cgroups), act=ActMode.ON,
                previous=cycles[-1].snapshot if cycles else None, advice=advice("hold"), totals=totals,
            )
        )  # fmt: skip
    return cycles


@pytest.mark.parametrize(
    ("ratio", "level", "number", "note"),
    [
        (1.0, "high", "240", "above 100 ms/s"),
        (0.1, "some", "24", "above 10 ms/s"),
        (0.01, "low", "2.4", "below 10 ms/s"),
    ],
)
def test_harm_is_a_tile_and_colours_the_verdict(
    browser: Browser, agent: AgentServer, ratio: float, level: str, number: str, note: str
) -> None:
    agent.show(harmed(ratio))
    page = opened(browser, agent)
    assert page.eval("document.getElementById('verdict').dataset.harm") == level
    assert (page.text("#harm"), page.text("#harm-unit"), page.text("#harm-tile-note")) == (number, "ms/s", note)
    assert page.eval("document.getElementById('harm-note').hidden") is (level == "low")
    if level == "high":
        assert page.text("#harm-note") == "Online pods wait 240 ms a second for reclaimed pods."
        colors = [
            page.eval(f"getComputedStyle(document.querySelector('{where}')).color") for where in ("#action", "#node")
        ]
        assert colors[0] != colors[1]
    assert page.errors() == []


def test_unmeasured_harm_is_no_zero(browser: Browser, agent: AgentServer) -> None:
    agent.show([busy_cycle(1), busy_cycle(2)])
    page = opened(browser, agent)
    assert (page.text("#harm"), page.text("#harm-unit")) == (formats.ABSENT, "")
    assert page.eval("document.getElementById('verdict').dataset.harm") == "low"


def test_the_node_is_named_in_heading_and_title(browser: Browser, agent: AgentServer) -> None:
    agent.show(harmed())
    page = opened(browser, agent)
    assert page.text("h1") == f"Dioptase · {NODE}"
    assert page.eval("document.title") == f"{NODE} · Dioptase"


def test_gain_and_cost_are_those_of_the_totals(browser: Browser, agent: AgentServer) -> None:
    agent.show(harmed())
    page = opened(browser, agent)
    assert rows(page, "#worth-cpu tbody") == [
        ["lent to reclaimed pods", "5.00", "2.50", ""],
        ["used by reclaimed pods", "4.25", "2.13", "85 % of lent"],
        ["· default", "4.00", "2.00", ""],
        ["· team-a", "0.25", "0.13", ""],
    ]
    assert rows(page, "#worth-latency tbody") == [
        ["with batch work", "90 min", "1.50", "540,000", "6.22 µs", "128 µs"],
        ["without batch work", "30 min", "1.20", "180,000", "6.22 µs", "60.8 µs"],
    ]
    assert page.text("#worth-more") == (
        "Online pods waited 36.0 s for reclaimed pods. Taken back: CPU reduced in 12 cycles (wait_above_target 12); "
        "1 eviction (below_min 1)."
    )


def test_what_the_totals_cannot_show_is_said(browser: Browser, agent: AgentServer) -> None:
    busy = msgspec.structs.replace(RICH_TOTALS, idle=type(RICH_TOTALS.idle)())
    agent.show([msgspec.structs.replace(cycle, act=ActMode.DRY_RUN) for cycle in harmed(totals=busy)])
    page = opened(browser, agent)
    assert "runs with --act dry-run, so it lends no CPU" in page.text("#worth-more")
    assert "the latency without batch work is unknown: suspend the batch jobs" in page.text("#worth-more")


def entry(seq: int, value: str) -> JournalEntry:
    return JournalEntry(
        seq=seq, wall_time_ns=1_700_000_000_000_000_000 + seq * 10**9, cycle_seq=seq, trigger="tick", policy="latency",
        outcome=msgspec.structs.replace(outcome(value=value), before="3", repaired=True),
    )  # fmt: skip


def test_repeated_decisions_are_one_line_with_a_count(browser: Browser, agent: AgentServer) -> None:
    agent.journal.all = [entry(seq, "0-1" if seq % 2 else "2-3") for seq in range(1, 8)]
    agent.show([busy_cycle(1), busy_cycle(2)])
    page = opened(browser, agent)
    page.until("document.querySelectorAll('.entry').length === 2")
    assert page.eval("[...document.querySelectorAll('.entry .times')].map(e => e.textContent.trim().slice(1))") == [
        "4",
        "3",
    ]
    assert page.text("#decisions-count") == "7"
    assert page.text(".entry time") == "22:13:27", "that of the latest one"


UID = "3f2c1b7e-9a44-4d0e-8c55-000000000001"
POD_CGROUP = f"/kubepods/burstable/pod{UID}"
NAME = "recommendation-feature-extractor-frontend-gateway-7c9f8d6b5-x2x9k"


def long_names() -> list[Cycle]:
    """A pod with a long name, its pause container and its pod's cgroup, in a kubelet's layout."""
    main, pause = f"{POD_CGROUP}/{'a' * 64}", f"{POD_CGROUP}/{'b' * 64}"
    pods = (
        Pod(
            uid=UID, namespace="team-personalization", name=NAME, qos=QoSLevel.SHARED,
            containers=(Container(name="feature-extractor", cgroup=main),),
        ),
    )  # fmt: skip
    cycles: list[Cycle] = []
    for cycle in interference_cycles(3, pods=pods):
        seconds = float(cycle.snapshot.seq)
        added = {path: sample(path, 900 + k, seconds, WEB) for k, path in enumerate((POD_CGROUP, main, pause))}
        snapshot = msgspec.structs.replace(cycle.snapshot, cgroups={**cycle.snapshot.cgroups, **added})
        cycles.append(
            msgspec.structs.replace(cycle, snapshot=snapshot, previous=cycles[-1].snapshot if cycles else None)
        )
    return cycles


def test_pods_are_named_and_not_paths(browser: Browser, agent: AgentServer) -> None:
    agent.show(long_names())
    page = opened(browser, agent)
    names = [row[0] for row in rows(page, "#workloads tbody")]
    pod = f"team-personalization/{NAME}"
    assert names[0] == pod, "the cell has the whole name, whatever it shows of it"
    assert {f"{pod} pause", f"{pod} (pod)"} <= set(names)
    assert pod in heat_rows(page)
    ends = "[...document.querySelectorAll('#workloads tbody th, .heat-names li')].map(e => e.getBoundingClientRect().right - "
    assert min(page.eval(ends + "e.querySelector('.name').lastChild.getBoundingClientRect().right)")) >= 0, (
        "ends are shown"
    )
    assert page.eval("document.querySelector('#workloads tbody th').title").startswith(f"team-personalization/{NAME}")


def test_the_root_cgroup_is_named(browser: Browser, agent: AgentServer) -> None:
    root = interference_cycles(3, pods=())
    only = [msgspec.structs.replace(cycle.snapshot, cgroups={"/": cycle.snapshot.cgroups["/"]}) for cycle in root]
    agent.show(
        msgspec.structs.replace(cycle, snapshot=only[k], previous=only[k - 1] if k else None)
        for k, cycle in enumerate(root)
    )
    page = opened(browser, agent)
    assert [row[0] for row in rows(page, "#workloads tbody")] == ["/ (the node)"]


def overflowing(page: Page) -> Sequence[str]:
    """Ids of the tables that are wider than their frame."""
    wide: list[str] = page.eval(
        "[...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth + 1)"
        ".map(e => e.id || e.firstElementChild.id)"
    )
    return wide


@pytest.mark.parametrize("width", [1440, 800])
def test_nothing_scrolls_sideways(browser: Browser, agent: AgentServer, width: int) -> None:
    agent.show([*long_names(), *interference_cycles(20, more=12)[-3:]])
    page = opened(browser, agent, width)
    assert page.eval("document.documentElement.scrollWidth") == width
    for columns in ("cpu", "memory", "io", "threads"):
        page.eval(f"document.querySelector('#columns [value={columns}]').click()")
        assert overflowing(page) == []


def test_sources_that_work_are_folded(browser: Browser, agent: AgentServer) -> None:
    agent.show([busy_cycle(1), busy_cycle(2)])
    page = opened(browser, agent)
    shown = (
        "[...document.querySelectorAll('#sources li')].filter(e => e.offsetParent).map(e => e.firstChild.textContent)"
    )
    assert (page.text("#sources-ok"), page.eval(shown)) == ("show 2 working sources", ["✕ psi"])
    page.eval("document.getElementById('sources-ok').click()")
    assert (page.text("#sources-ok"), len(page.eval(shown))) == ("hide 2 working sources", 3)
    assert page.eval("document.getElementById('sources-ok').getAttribute('aria-expanded')") == "true"


def test_a_node_without_decisions_shows_no_empty_charts_of_them(browser: Browser, agent: AgentServer) -> None:
    agent.show(harmed())
    page = opened(browser, agent)
    assert page.eval("getComputedStyle(document.querySelector('#then-lent')).display") == "none"
