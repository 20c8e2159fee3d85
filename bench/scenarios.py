"""What online service and batch job do in the colocation bench: steady or bursty, computing or on memory."""

from __future__ import annotations

import msgspec

from demo.schedule import Constant, Schedule, bursts
from demo.workloads import Size

CALM_SHARE, BURST_SHARE, BURSTING = 0.3, 0.7, 0.25
"""Of the node, between bursts and in them, and the part of the time that they last: 40 % on average. Higher bursts of requests
that memory makes dearer would be more than the node can serve, and all that is seen then is how long the bursts last."""
BURST_EVERY_S = 1.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of workloads."""

    name: str
    what: str
    load: float
    """Of all CPUs, what the online service uses on average."""
    bursty: bool = False
    memory: bool = False
    """Requests are work on memory, and the batch job streams through memory and page cache."""

    def schedule(self, size: Size, seconds: float, from_s: float) -> Schedule:
        """The requests of a cell whose measured time lasts `seconds` from `from_s` on; before it they come alike."""
        if not self.bursty:
            return Constant(rate=size.rate(self.load))
        drawn = bursts(
            size.rate(CALM_SHARE), size.rate(BURST_SHARE), period_s=seconds,
            count=max(round(seconds / BURST_EVERY_S), 1), on_share=BURSTING, seed=1,
        )  # fmt: skip
        return msgspec.structs.replace(drawn, from_s=from_s)


def steady(percent: int) -> Scenario:
    """A steady load beside batch work that computes."""
    return Scenario(
        name=f"steady-{percent}", what=f"{percent} % of the node, steadily; batch computes", load=percent / 100
    )


_BURSTS = f"{CALM_SHARE:.0%} of the node with bursts of {BURST_SHARE:.0%}, 40 % on average"
SCENARIOS: tuple[Scenario, ...] = (
    *map(steady, (10, 20, 40, 60)),
    Scenario(name="memory", what="40 %, steadily; both work on memory", load=0.4, memory=True),
    Scenario(name="bursty", what=f"{_BURSTS}; batch computes", load=0.4, bursty=True),
    Scenario(name="bursty-memory", what=f"{_BURSTS}; both work on memory", load=0.4, bursty=True, memory=True),
)
DEFAULT_SCENARIOS = ("steady-60", "memory", "bursty")
CURVE_SCENARIO = "bursty-memory"
"""Where the trade-off is drawn: the worst neighbour and the least even load."""
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
