"""How tests open the page and read what it shows."""

from __future__ import annotations

import json

from tests.browser.chromium import Browser, Page
from tests.builders.agent_server import AgentServer

LIVE = "document.body.dataset.live === 'live'"


def opened(browser: Browser, agent: AgentServer, width: int = 1440, height: int = 900, scheme: str = "dark") -> Page:
    """The agent's page in a tab of that size, once it shows a round."""
    page = browser.page(width, height, scheme)
    page.go(agent.url)
    page.until(LIVE)
    return page


def rows(page: Page, table: str) -> list[list[str]]:
    """Texts of a table's cells, its head included; of its body alone with `#table tbody`."""
    actual: list[list[str]] = page.eval(
        f"[...document.querySelectorAll('{table} tr')].map(r => [...r.cells].map(c => c.textContent.trim()))"
    )
    return actual


def heat_rows(page: Page) -> list[str]:
    """Names of the cgroups on the heat map."""
    names: list[str] = page.eval("[...document.querySelectorAll('.heat-names li')].map(n => n.textContent)")
    return names


def choose(page: Page, control: str, value: str) -> None:
    """Enter that value into a field or a list of choices."""
    page.eval(
        f"""(() => {{ const c = document.querySelector({json.dumps(control)}); c.value = {json.dumps(value)};
        c.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"""
    )
