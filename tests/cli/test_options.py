"""What the options of several commands take and refuse."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from cli.main import main
from cli.options import Seconds, parse_listen, parse_listen_hosts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9102", ("127.0.0.1", 9102)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:65535", ("localhost", 65535)),
    ],
)
def test_an_address_is_host_and_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("127.0.0.1:9102", ("127.0.0.1",)),
        ("10.0.0.1,127.0.0.1:9102", ("10.0.0.1", "127.0.0.1")),
        # `status.hostIPs` of a node with two families, and of one with IPv6 only, as the chart passes them.
        ("10.0.0.1,fd00::1,127.0.0.1:9102", ("10.0.0.1", "fd00::1", "127.0.0.1")),
        ("fd00::1,127.0.0.1:9102", ("fd00::1", "127.0.0.1")),
        ("fd00::1:9102", ("fd00::1",)),
        ("[fd00::1],[::1]:9102", ("fd00::1", "::1")),
        ("[::]:9102", ("::",)),
    ],
)
def test_several_hosts_share_a_port(text: str, hosts: tuple[str, ...]) -> None:
    assert parse_listen_hosts(text) == (hosts, 9102)


@pytest.mark.parametrize("text", [",127.0.0.1:9102", "10.0.0.1,:9102", "10.0.0.1,,127.0.0.1:9102", "[]:9102"])
def test_an_empty_host_is_refused(text: str) -> None:
    """Such as without `status.hostIPs` in the pod's environment; asyncio would listen on every address."""
    with pytest.raises(click.BadParameter, match="has an empty host"):
        parse_listen_hosts(text)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("9102", "is not HOST:PORT"),
        (":9102", "is not HOST:PORT"),
        ("host:http", "is not HOST:PORT"),
        ("host:²", "is not HOST:PORT"),
        ("host:65536", "no port above 65535"),
        ("host:" + "9" * 5000, "no port above 65535"),
    ],
)
def test_what_is_no_address_is_refused_with_the_reason(text: str, result: str) -> None:
    with pytest.raises(click.BadParameter, match=result) as caught:
        parse_listen(text, "--malachite")
    assert "--malachite" in caught.value.format_message()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("nan", "is not a number of seconds"),
        ("inf", "is not a number of seconds"),
        ("10s", "is not a number of seconds"),
        ("", "is not a number of seconds"),
        ("1e999", "is not a number of seconds"),
        ("1e308", "is more than a year"),
        ("1e10", "is more than a year"),
        ("31622401", "is more than a year"),
    ],
)
def test_a_time_span_is_a_number_that_ends(text: str, value: str) -> None:
    @click.command()
    @click.option("--duration", type=Seconds(min=0))
    def command(duration: float) -> None:
        raise AssertionError(duration)

    result = CliRunner().invoke(command, ["--duration", text])
    assert (result.exit_code, value in result.output) == (2, True)


@pytest.mark.parametrize(
    ("words", "near"),
    [(["agnet"], "agent"), (["probe", "blockios"], "blockio"), (["probe", "runqlta"], "runqlat"), (["xyzzy"], "")],
)
def test_a_misspelt_command_gets_a_suggestion(words: list[str], near: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert f"No such command '{words[-1]}'." in result.output
    assert ("Did you mean " in result.output) is bool(near)
    assert f"Did you mean {near}" in result.output or not near


@pytest.mark.parametrize("words", [["probe"], ["probe", "threads"], ["doctor"]])
def test_ctrl_c_ends_quietly_wherever_a_command_is(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("probes.loader.Compiler.__enter__", interrupted)
    monkeypatch.setattr("probes.loader.load", interrupted)
    monkeypatch.setattr("probes.threads.load", interrupted)
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, result.output) == (130, "")
