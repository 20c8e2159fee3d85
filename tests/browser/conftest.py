"""Fixtures of the page tests: a browser, an agent that shows given cycles, and a simulated run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Browser, Page, chromium
from tests.browser.page_reader import opened
from tests.builders import colocation_run
from tests.builders.agent_server import AgentServer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def agent() -> Iterator[AgentServer]:
    created = AgentServer()
    yield created
    created.close()


@pytest.fixture(scope="session")
def reported() -> colocation_run.ColocationRun:
    return colocation_run.simulate_run(240)


@pytest.fixture
def page(browser: Browser, agent: AgentServer, reported: colocation_run.ColocationRun) -> Page:
    """The page of an agent that shows the whole run with its decisions."""
    agent.journal.all = list(reported.entries)
    agent.show(reported.rounds)
    return opened(browser, agent)
