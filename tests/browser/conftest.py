"""What every test of the page has: a browser, an agent that shows what it is told to, and a story for it to show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Browser, chromium
from tests.cli import story
from tests.cli.agent import Agent


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


@pytest.fixture(scope="session")
def told() -> story.Story:
    return story.tell(240)
