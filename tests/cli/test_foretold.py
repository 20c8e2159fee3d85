"""Forecasts in words."""

from __future__ import annotations

import msgspec
import pytest

from api.forecasts import Outlook
from api.knobs import Verdict
from cli.foretold import sentence
from cli.words import NONE
from tests.rich import FORECASTS

CPU, MEMORY = FORECASTS
UNKNOWN = msgspec.structs.replace(
    CPU,
    forecast=msgspec.structs.replace(
        CPU.forecast,
        peak=None,
        verdict=Verdict(rule="no_history", text="Less than 10 minutes of use are known, too little to foretell."),
    ),
)


MISSED = "the peak exceeded {} of the last day's forecasts, 5.5 % are allowed"
ALARM = "memory: at most 2.93 GiB within the hour, 1.95 GiB now, not trusted yet; above every forecast within the last hour; "


@pytest.mark.parametrize(
    ("outlook", "text"),
    [
        (CPU, f"cpu: at most 2.25 cores within the hour, 1.50 cores now; {MISSED.format('6.3 %')}"),
        (MEMORY, f"{ALARM}{MISSED.format('25 %')}"),
        (
            msgspec.structs.replace(CPU, score=None, used=None),
            f"cpu: at most 2.25 cores within the hour, {NONE} cores now",
        ),
        (UNKNOWN, "cpu: Less than 10 minutes of use are known, too little to foretell."),
    ],
)
def test_a_forecast_in_words(outlook: Outlook, text: str) -> None:
    assert sentence(outlook) == text
