"""CPU use of reclaimed pods by NUMA node, as an input of CPU provision."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.provision.provisioner import build_provision_inputs
from agent.config.advisor import InferenceConfig
from api.pod import Pod
from api.rates import CgroupRates, NodeRates, Rates
from tests.builders.nodes import S, topology
from tests.builders.pods import reclaimed
from tests.builders.snapshots import snapshot

EVEN = {"reclaim": (*range(8), *range(24, 32))}
"""8 CPUs of each of two NUMA nodes."""


def batch(name: str, *numa: int) -> Pod:
    return replace(reclaimed(name), bound_numa=numa)


@pytest.mark.parametrize(
    ("pods", "use", "cpus", "expected"),
    [
        ([batch("a", 0), batch("b", 0)], {"a": 4.0, "b": 2.0}, {}, {0: 6.0, 1: 0.0}),
        ([batch("a", 0), batch("free")], {"a": 4.0, "free": 2.0}, {}, {0: 5.0, 1: 1.0}),
        # kept off the node that has bound ones: all of it is on the other
        ([batch("a", 0), batch("free")], {"a": 4.0, "free": 2.0}, {"/free": (24, 25)}, {0: 4.0, 1: 2.0}),
        ([batch("free")], {"free": 2.0}, {"/free": (0, 24, 25, 26)}, {0: 0.5, 1: 1.5}),
        # bound to several, or to one that is not there, is bound to none
        ([batch("a", 0, 1), batch("b", 7)], {"a": 4.0, "b": 2.0}, {}, {0: 3.0, 1: 3.0}),
        # what is not known is known of no node that it may be on
        ([batch("a", 0), batch("b", 1)], {"a": None, "b": 2.0}, {}, {1: 2.0}),
        ([batch("a", 0), batch("free")], {"a": 4.0, "free": None}, {}, {}),
        ([batch("a", 0), batch("free")], {"a": 4.0, "free": None}, {"/free": (24,)}, {0: 4.0}),
        ([], {}, {}, {0: 0.0, 1: 0.0}),
    ],
)
def test_use_is_where_the_pods_are(
    pods: list[Pod],
    use: Mapping[str, float | None],
    cpus: Mapping[str, tuple[int, ...]],
    expected: Mapping[int, float],
) -> None:
    current = snapshot(1, pods, machine=topology(48, sockets=2))
    change = Rates(
        node=NodeRates(interval_ns=S),
        cgroups={f"/{name}": CgroupRates(interval_ns=S, cpu_cores=cores) for name, cores in use.items()},
    )
    built = build_provision_inputs(current, change, AdvisorState(pools=EVEN, cpus=cpus), InferenceConfig(), S)
    assert built.reclaim_use_cores == expected
    assert (
        build_provision_inputs(
            current, None, AdvisorState(pools=EVEN, cpus=cpus), InferenceConfig(), S
        ).reclaim_use_cores
        == {}
    )
    assert build_provision_inputs(current, change, AdvisorState(), InferenceConfig(), S).reclaim_use_cores == {}
