"""Policy `dynamic-quota`: reclaimed pods of a NUMA node may use what brings its online CPUs to their target of use."""

from __future__ import annotations

from agent.advisor.provision.policies import Answer, Case, Proposal, Settings
from api.advice import Control

INDICATOR = "cpu_usage_ratio"


def dynamic_quota(case: Case, settings: Settings) -> Answer:  # noqa: ARG001 - every policy has this form
    """Quota = CPUs of reclaimed pods x (target - current) + what they use, at least what is reserved for them."""
    if not case.enable_reclaim:
        return "reclaiming is switched off"
    if not case.region.bound:
        return "it is not bound to a NUMA node"
    signal = next((signal for signal in case.signals if signal.name == INDICATOR), None)
    cpus, used = case.reclaim_cpus, case.reclaim_use_cores
    if signal is None or used is None:
        return _unknown(case)
    reserved = case.bounds.reserved_for_reclaim
    quota = max(cpus * (signal.target - signal.current) + used, reserved)
    return Proposal(
        policy="dynamic-quota",
        controls={Control.RECLAIM_QUOTA: quota},
        text=f"reclaimed pods on {cpus} CPUs use {used:.2f} cores while {INDICATOR} is {signal.current:.3g}, its target "
        f"{signal.target:.3g}: their quota is max({cpus} x ({signal.target:.3g} - {signal.current:.3g}) + {used:.2f}, "
        f"{reserved:g}) = {quota:.2f} cores",
        inputs={
            INDICATOR: round(signal.current, 4),
            f"{INDICATOR}_target": round(signal.target, 4),
            "reclaim_cpus": cpus,
            "reclaim_use_cores": round(used, 3),
        },
    )


def _unknown(case: Case) -> Answer:
    """Without its inputs a quota that was given stays as it is."""
    held = case.memory.quota_cores
    if case.memory.policy != "dynamic-quota" or held is None:
        return f"{INDICATOR} or the use of reclaimed pods is not known"
    return Proposal(
        policy="dynamic-quota",
        controls={Control.RECLAIM_QUOTA: held},
        text=f"{INDICATOR} or the use of reclaimed pods is not known any more: their quota stays at {held:.2f} cores",
    )
