"""What `dioptase agent` says of what it cannot do on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent import __main__ as agent
from agent.hierarchy import Hierarchy
from api.ports import Unavailable


@pytest.mark.parametrize(
    ("watching", "begins"),
    [
        (
            False,
            "Run-queue waits come from schedstat, as sums without a distribution, and of listed pods only: ",
        ),
        (True, "There are no run-queue waits: without BPF they come from schedstat, of listed pods only: "),
    ],
)
def test_waits_without_bpf_are_said_to_be_of_pods_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, watching: bool, begins: str
) -> None:
    def refused(*, blame: bool) -> None:
        raise Unavailable("bpf() is refused", "run as root")

    monkeypatch.setattr(agent, "open_waits", refused)
    hierarchy = Hierarchy(v1={}, v2=tmp_path)
    source, banner = agent._open_waits(hierarchy, blame=True, watching=watching)
    source.close()
    assert banner == (f"{begins}bpf() is refused: run as root.",)
