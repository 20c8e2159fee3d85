"""What the options of several commands take and refuse."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from cli.options import Seconds, parse_listen


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
    ("text", "said"),
    [
        ("9102", "is not HOST:PORT"),
        (":9102", "is not HOST:PORT"),
        ("host:http", "is not HOST:PORT"),
        ("host:²", "is not HOST:PORT"),
        ("host:65536", "no port above 65535"),
        ("host:" + "9" * 5000, "no port above 65535"),
    ],
)
def test_what_is_no_address_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(click.BadParameter, match=said):
        parse_listen(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nan", "is no number of seconds"),
        ("inf", "is no number of seconds"),
        ("1e999", "is no number of seconds"),
        ("1e308", "is more than a year"),
        ("1e10", "is more than a year"),
        ("31622401", "is more than a year"),
    ],
)
def test_a_time_span_is_a_number_that_ends(text: str, said: str) -> None:
    @click.command()
    @click.option("--duration", type=Seconds(min=0))
    def command(duration: float) -> None:
        raise AssertionError(duration)

    result = CliRunner().invoke(command, ["--duration", text])
    assert (result.exit_code, said in result.output) == (2, True)
