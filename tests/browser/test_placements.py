"""What the page shows of the scheduler's data on this node: indicators of harm, and pods placed here last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest

from api.decision import Cycle
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import Pressure
from cli import formats
from tests.browser.chromium import Browser
from tests.browser.page_reader import opened, rows
from tests.browser.test_worth import harmed
from tests.builders.agent_server import AgentServer
from tests.builders.four_cpu_node import busy_cycle

pytestmark = pytest.mark.browser


@pytest.fixture
def agent() -> Iterator[AgentServer]:
    created = AgentServer()
    yield created
    created.close()


def placed_pod(name: str, placed_s: float, score: str = "") -> Pod:
    annotations = {"dioptase.io/placement-score": score} if score else {}
    return Pod(
        uid=name, namespace="team", name=name, qos=QoSLevel.RECLAIMED, annotations=annotations, placed_s=placed_s,
        containers=(Container(name="main", cgroup=f"/{name}"),),
    )  # fmt: skip


def with_pods(cycles: Sequence[Cycle], *ages_s: float) -> list[Cycle]:
    """The cycles with a reclaimed pod for each age, counted back from the last cycle, and with CPU pressure of 8 %."""
    now_s = cycles[-1].snapshot.wall_time_ns / 1e9
    pods = [placed_pod(f"job-{i}", now_s - age_s, "" if i else "71.6") for i, age_s in enumerate(ages_s)]

    def changed(cycle: Cycle) -> Cycle:
        node = msgspec.structs.replace(
            cycle.snapshot.node, cpu_pressure=Pressure(some_us=1, some_avg10=50.0, some_avg60=8.0)
        )
        snapshot = msgspec.structs.replace(cycle.snapshot, pods=(*cycle.snapshot.pods, *pods), node=node)
        return msgspec.structs.replace(cycle, snapshot=snapshot)

    results: list[Cycle] = []
    for cycle in map(changed, cycles):
        previous = results[-1].snapshot if results else None
        results.append(msgspec.structs.replace(cycle, previous=previous))
    return results


def test_harm_is_shown_with_its_limits_and_placed_pods_with_their_scores(browser: Browser, agent: AgentServer) -> None:
    """The online pod waits 240 ms a second for reclaimed pods, where the scheduler scores 0 at 500."""
    agent.show(with_pods(harmed(), 42, 4000, 600))
    page = opened(browser, agent)
    shown = {row[0]: row[1:] for row in rows(page, "#harm-rows tbody")}
    assert shown["waiting for reclaimed pods"] == ["240 ms/s", "500 ms/s", "48 %"]
    assert shown["run-queue latency p99"][1] == "10 ms"
    assert shown["CPU pressure"] == ["8.0 %", "40 %", "20 %"]
    assert next(iter(shown)) == max(shown, key=lambda name: float(shown[name][2].removesuffix(" %"))), (
        "the worst is first"
    )
    assert rows(page, "#placement-rows tbody") == [
        ["team/job-0", "42 s ago", "72"],
        ["team/job-2", "10 min ago", formats.ABSENT],
        ["team/job-1", "67 min ago", formats.ABSENT],
    ]
    assert "once a minute" in page.text("#harm-report")
    assert page.errors() == []


def test_without_times_of_placement_the_page_names_the_reason(browser: Browser, agent: AgentServer) -> None:
    agent.show([busy_cycle(1), busy_cycle(2)])
    page = opened(browser, agent)
    assert page.eval("document.getElementById('placement-rows').hidden")
    assert page.text("#no-placements").startswith("No reclaimed pod with a time of placement runs here.")


def test_at_most_eight_placements_are_listed(browser: Browser, agent: AgentServer) -> None:
    agent.show(with_pods(harmed(), *range(12)))
    page = opened(browser, agent)
    assert [row[0] for row in rows(page, "#placement-rows tbody")] == [f"team/job-{i}" for i in range(8)]
