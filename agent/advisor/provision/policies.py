"""What every provision policy is given and what it answers, and the plain ones: `none` and `canonical`.

A policy answers with `Proposal`, or with a sentence why it cannot be followed this round; then the next one is asked.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.advisor.provision.situation import Controller, RegionMemory
from agent.advisor.regions import Bounds
from agent.config import AdvisorConfig
from agent.config.provision import Gains
from api.advice import Control, Region, Signal
from api.knobs import Verdict


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One region, as its policy sees it."""

    region: Region
    bounds: Bounds
    need: float
    """Canonical estimate in cores."""
    knob: tuple[Control, float]
    """What is turned, and where it stands: the quota of reclaimed pods where they have one, otherwise the requirement."""
    enable_reclaim: bool = True
    signals: tuple[Signal, ...] = ()
    unknown: frozenset[str] = frozenset()
    """Indicators that were followed and still have a target, and no value this time."""
    retargeted: Verdict | None = None
    """How predictions moved the targets of the signals; None where none are followed."""
    memory: RegionMemory = RegionMemory()
    reclaim_cpus: int = 0
    """CPUs that reclaimed pods may run on in the region's NUMA nodes."""
    reclaim_use_cores: float | None = None
    """What they use of them."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy wants of the region's controls, before any regulation."""

    policy: str
    controls: Mapping[Control, float]
    text: str
    """The formula with its numbers, as a part of a sentence."""
    inputs: Mapping[str, float | int | str | None] = {}
    controllers: Mapping[str, Controller] = {}


Answer = Proposal | str


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Those of all policies."""

    advisor: AdvisorConfig
    gains: Mapping[str, Gains]


def none(case: Case, settings: Settings) -> Answer:  # noqa: ARG001 - every policy has this form
    """Nobody says what the region needs: it keeps what its pods asked for, and nothing is lent of it."""
    return Proposal(policy="none", controls={}, text="no policy looks at it, so it keeps what its pods asked for")


def canonical(case: Case, settings: Settings) -> Answer:  # noqa: ARG001
    """The requirement is the estimated need of its containers."""
    count = len(case.region.containers)
    return Proposal(
        policy="canonical",
        controls={Control.REQUIREMENT: case.need},
        text=f"{count} container{'' if count == 1 else 's'} {'is' if count == 1 else 'are'} estimated to need "
        f"{case.need:.2f} cores",
    )
