"""`dioptase config` against a server: all settings, some of them, and the error without an agent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from agent.config.config import AgentConfig
from agent.dynamic_config.effective import effective_configuration, setting_leaves
from agent.dynamic_config.merge import resolve_config
from cli.config import config
from exporters.page.web_server import AgentWebServer
from tests.agent.dynamic_config.test_merge import ADMIN, fits, reclaim, thing
from tests.builders.colocation_run import MemoryJournal

OBJECT = thing(reclaim(enableReclaim=False, cpuHeadroomConfig={"utilBasedConfig": {"nonReclaimUtilizationLow": 0.2}}))
CONFIGURATION = effective_configuration(resolve_config(AgentConfig(), {}, {ADMIN: OBJECT}, fits), {}, 5)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = AgentWebServer(journal=MemoryJournal(()), version="test", configuration=lambda: CONFIGURATION)
    port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0), loop).result(10)
    yield f"http://127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def call(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(config, [*arguments, "--url", url])


def test_every_setting_has_a_line_and_then_come_the_objects(url: str) -> None:
    lines = call(url).stdout.splitlines()
    names = [".".join(path) for path, _ in setting_leaves(AgentConfig())]
    assert [line.split()[0] for line in lines[: len(names)]] == names
    text = next(line for line in lines if line.startswith("advisor.enableReclaim "))
    assert "false  (AdminQoSConfiguration kube-system/all h1: spec.config.reclaimedResourceConfig.enableReclaim" in text
    assert lines[-2].startswith("AdminQoSConfiguration kube-system/all h1 applies since 1970-01-01")
    assert lines[-1] == (
        "  not applied: reclaimedResourceConfig.cpuHeadroomConfig.utilBasedConfig.nonReclaimUtilizationLow: "
        "Katalyst's own agent ignores it too"
    )


def test_a_part_of_them(url: str) -> None:
    lines = call(url, "advisor.headroom.util", "intervalS").stdout.splitlines()
    assert len(lines) == 6
    assert lines[0].split() == ["intervalS", "1", "(default)"]


def test_a_name_that_is_none_is_said(url: str) -> None:
    done = call(url, "advisor.headrom")
    assert done.exit_code == 2
    assert "there is no setting 'advisor.headrom'" in done.stderr


def test_without_an_agent_there_is_a_remedy() -> None:
    done = call("http://127.0.0.1:1")
    assert done.exit_code == 1
    assert "remedy: start it with dioptase agent" in done.stderr
