"""From the reclaim pool to reported headroom: Katalyst's tutorial, and utilisation with its feedback."""

from __future__ import annotations

from itertools import pairwise

import pytest

from agent.advisor.headroom.headroom_policies import ReclaimPoolInputs, assemble_headroom
from agent.advisor.headroom.headroom_reporter import NodeCapacity, ReporterState, report_headroom
from agent.advisor.headroom.reclaim_exclusion import ReclaimableNodes
from agent.config.advisor import CpuUtilBasedConfig, HeadroomConfig
from agent.config.report import ReportConfig
from api.advice import NOT_NUMA_BOUND, Headroom
from api.cpu import Topology
from tests.builders.nodes import topology

S = 1_000_000_000


def report_cycle(
    node: Topology, pool: int, used: float, config: HeadroomConfig, state: ReporterState, at_s: float
) -> tuple[Headroom, ReporterState]:
    """Run one cycle on a node of one NUMA node whose last CPUs are the reclaim pool, which only reclaimed pods use."""
    cpus = node.ids[len(node.ids) - pool :]
    last = state.reported_headroom.cores_by_numa if state.reported_headroom else {}
    result = assemble_headroom(
        ReclaimPoolInputs(
            topology=node,
            cpus={0: cpus},
            busy=dict.fromkeys(cpus, used / pool),
            use_cores={NOT_NUMA_BOUND: used},
            reclaimable_nodes=ReclaimableNodes(numa_nodes=(0,)),
            last_cores=last,
        ),
        config,
    )
    return report_headroom(
        result, NodeCapacity(cores_by_numa={0: float(len(node.ids))}), state, ReportConfig(), round(at_s * S)
    )


def test_the_tutorial_node_reports_44_then_42_then_40() -> None:
    node, state = topology(48), ReporterState()
    settled = []
    for phase, pool in enumerate((44, 42, 40)):
        for second in range(0, 300, 5):
            reported, state = report_cycle(node, pool, 0.0, HeadroomConfig(), state, phase * 300 + second)
        settled.append((reported.cores, dict(reported.cores_by_numa)))
    assert settled == [(44, {0: 44}), (42, {0: 42}), (40, {0: 40})]


def test_utilisation_headroom_grows_in_steps_to_its_rate_and_shrinks_again() -> None:
    config = HeadroomConfig(util=CpuUtilBasedConfig(enable=True, maximum=0.8))
    node, state, story = topology(96), ReporterState(), []
    for number in range(60):
        used = 4.0 if number < 30 else 36.0
        reported, state = report_cycle(node, 40, used, config, state, number * 30)
        story.append(reported.cores)
    assert story[:3] == [None, None, None]
    assert story[3] == 40  # nothing was reported yet, so the supply is
    assert story[29] == 48  # 40 x 1.2, although .1 of it is used
    assert story[59] == pytest.approx(40, abs=0.3)  # .9 is used, above .8: back to what there is, but for a min step
    reported_cores = [cores for cores in story if cores is not None]
    steps = [abs(after - before) for before, after in pairwise(reported_cores)]
    assert max(steps) <= 4
