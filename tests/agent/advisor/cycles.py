"""Whole cycles for the advisor's tests: settings from YAML, one evaluation per snapshot, and their advice."""

from __future__ import annotations

from collections.abc import Iterable

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.engine import PolicyState, advise_cpu, evaluate_policy
from agent.advisor.policy_result import PolicyResult
from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from api.advice import Headroom
from api.decision import Advice
from api.snapshot import Snapshot
from tests.builders.settings import parse_config


def settings(text: str) -> AgentConfig:
    return parse_config(text.encode(), "test.yaml")


def evaluate_cycles(
    snapshots: Iterable[Snapshot], config: AgentConfig, state: PolicyState | None = None
) -> tuple[list[PolicyResult], PolicyState]:
    """Evaluate a cycle per snapshot; return all results and the last state."""
    state, results = state or PolicyState(), []
    for current in snapshots:
        result, state = evaluate_policy(current, config, state, current.taken_at_ns)
        results.append(result)
    return results, state


def advise_cycles(
    snapshots: Iterable[Snapshot], config: AdvisorConfig, state: AdvisorState | None = None
) -> list[Advice]:
    """Return the CPU advice of a cycle per snapshot."""
    state, advices = state or AdvisorState(), []
    for current in snapshots:
        advice, state = advise_cpu(current, config, state, current.taken_at_ns)
        assert advice is not None
        advices.append(advice)
    return advices


def advice_of(result: PolicyResult) -> Advice:
    assert result.advice is not None
    return result.advice


def headroom_of(result: PolicyResult) -> Headroom:
    headroom = advice_of(result).headroom
    assert headroom is not None
    return headroom


def reported_of(result: PolicyResult) -> Headroom:
    headroom = advice_of(result).reported_headroom
    assert headroom is not None
    return headroom
