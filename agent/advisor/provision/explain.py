"""What was decided of a region, in words: formula, numbers, and what came of them."""

from __future__ import annotations

import msgspec

from agent.advisor.assembler import Assembled, Want
from agent.advisor.headroom.region import RegionNeed, Score, region_headroom
from agent.advisor.provision.policies import Proposal
from agent.advisor.provision.situation import RegionMemory
from agent.advisor.regions import Bounds
from agent.advisor.regulator import Regulated
from agent.config import AdvisorConfig
from api.advice import Control, Region, RegionAdvice, RegionKind, Signal
from api.knobs import Verdict

NO_PROFILE = Score(value=100.0)
"""How a service fares of which nobody says that it fares badly; Katalyst's answer too."""


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one region before pools are sized."""

    region: Region
    bounds: Bounds
    proposal: Proposal
    want: Want
    need: float = 0.0
    before: int | None = None
    memory: RegionMemory = RegionMemory()
    regulated: Regulated | None = None
    """None of a pod that is kept apart: its size is not regulated."""
    signals: tuple[Signal, ...] = ()
    skipped: tuple[str, ...] = ()
    cause: Verdict | None = None
    """Why it is kept apart."""


def explain(one: Decided, assembled: Assembled, note: str) -> RegionAdvice:
    """The advice for one region, with its verdict; `note` is about all of them."""
    region, limits = one.region, one.bounds
    controls = dict(one.proposal.controls)
    if one.regulated is not None and controls:
        controls[Control.REQUIREMENT] = float(one.regulated.cpus)
    inputs: dict[str, float | int | str | None] = {
        "cpus": assembled.granted[region.name],
        "lent_cpus": assembled.lent[region.name],
        "request_cpus": one.want.request,
        "upper_cores": round(limits.upper, 3),
        "lower_cores": round(limits.lower, 3),
        "reserved_for_allocate_cores": round(limits.reserved_for_allocate, 3),
        "reserved_for_reclaim_cores": round(limits.reserved_for_reclaim, 3),
    }
    if one.regulated is not None:
        inputs |= {"estimate_cores": round(one.need, 3), "before_cpus": one.before, "wanted_cpus": one.regulated.wanted}
    if one.cause is not None:
        inputs |= one.cause.inputs
    return RegionAdvice(
        region=region,
        policy=one.proposal.policy,
        controls=controls,
        upper_cores=limits.upper,
        lower_cores=limits.lower,
        signals=one.signals,
        verdict=Verdict(
            rule=_rule(one),
            text=f"{region.name}: {_text(one, assembled)}{note}.",
            threshold=limits.upper if one.cause is None else one.cause.threshold,
            inputs=inputs | dict(one.proposal.inputs),
        ),
    )


def with_headroom(advice: RegionAdvice, one: Decided, advisor: AdvisorConfig) -> RegionAdvice:
    """The same with what the region leaves to reclaimed pods, by the policy of headroom for its kind."""
    limits = one.bounds
    policies = {
        RegionKind.SHARE: advisor.headroom.share_region,
        RegionKind.ISOLATION: advisor.headroom.isolation_region,
        RegionKind.DEDICATED: advisor.headroom.dedicated_region,
    }
    need = RegionNeed(
        name=one.region.name,
        upper_cores=limits.upper,
        estimate_cores=one.need,
        reserved_for_allocate_cores=limits.reserved_for_allocate,
        reserved_for_reclaim_cores=limits.reserved_for_reclaim,
        reclaimable=one.region.reclaimable,
        score=NO_PROFILE,
    )
    cores, verdict = region_headroom(need, policies[one.region.kind])
    return msgspec.structs.replace(advice, headroom_cores=cores, headroom_verdict=verdict)


def _rule(one: Decided) -> str:
    if one.cause is not None:
        return one.cause.rule
    if not one.region.reclaimable and one.proposal.controls:
        return "provision_not_reclaimable"
    return f"provision_{one.proposal.policy.replace('-', '_')}"


def _text(one: Decided, assembled: Assembled) -> str:
    name = one.region.name
    parts = [one.proposal.text]
    regulated = one.regulated
    if regulated is not None and one.proposal.controls:
        parts.append(
            f"with a reserve of {one.bounds.reserved_for_allocate:.4g} that makes {regulated.wanted} CPUs"
            + (f"; {regulated.limit}, so {regulated.cpus}" if regulated.limit else "")
        )
    if not one.region.reclaimable and regulated is not None:
        parts.append(f"nothing of it is lent: it asked for {one.want.request}")
    parts.append(
        f"it gets {assembled.granted[name]}"
        + (", since all pools together ask for more than there is" if name in assembled.throttled else "")
        + (f", of which {assembled.lent[name]} are lent" if assembled.lent[name] else "")
    )
    return "; ".join((*parts, *one.skipped))
