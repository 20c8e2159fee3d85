"""The problem that a component reports, where a test expects one."""

from __future__ import annotations

from typing import Protocol

from api.interfaces import Unavailable


class _Component(Protocol):
    def problem(self) -> Unavailable | None: ...


def problem_of(component: _Component) -> Unavailable:
    """Return the component's problem; fails the test if it has none."""
    problem = component.problem()
    assert problem is not None, "the component reports no problem"
    return problem
