"""Properties of every plan: no target becomes hot, no budget is exceeded, and reclaimed pods are moved first."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from controller.descheduler.move_plan import MovePlanner
from tests.controller.descheduler.hot_nodes import CAPACITY, Cluster, PodSpec, settings

LEVELS = st.sampled_from(("reclaimed_cores", "reclaimed_cores", "shared_cores"))
PODS = st.lists(st.tuples(st.integers(0, 30), LEVELS, st.sampled_from("ab"), st.integers(0, 3)), max_size=12)


@given(
    hot=st.lists(st.tuples(st.integers(51, 100), PODS), min_size=1, max_size=3),
    targets=st.lists(st.integers(0, 25), max_size=4),
    offered=st.integers(0, 8000),
    per_node=st.integers(1, 8), per_namespace=st.integers(1, 8), per_workload=st.integers(1, 3), total=st.integers(1, 12),
)  # fmt: skip
def test_a_plan_makes_no_target_hot_and_exceeds_no_budget(
    hot: list[tuple[int, list[tuple[int, str, str, int]]]], targets: list[int], offered: int, per_node: int,
    per_namespace: int, per_workload: int, total: int,
) -> None:  # fmt: skip
    config = settings(
        maxNoOfPodsToEvictPerNode=per_node, maxNoOfPodsToEvictPerNamespace=per_namespace,
        maxNoOfPodsToEvictPerWorkload=per_workload, maxNoOfPodsToEvictTotal=total,
    )  # fmt: skip
    usages = {f"hot{number}": float(usage) for number, (usage, _) in enumerate(hot)}
    usages |= {f"target{number}": float(usage) for number, usage in enumerate(targets)}
    cluster = Cluster(usages, config, offered=offered)
    for number, (_, pods) in enumerate(hot):
        for index, (cpu, level, namespace, workload) in enumerate(pods):
            owner = {"apiVersion": "v1", "kind": "Job", "name": f"w{workload}", "uid": "u", "controller": True}
            fields = {"namespace": namespace, "owner": owner}
            cluster.add(f"hot{number}", PodSpec(f"p{number}-{index}", cpu, level, fields))
    inputs = cluster.inputs()
    planner = MovePlanner(inputs)
    plans = planner.plan(cluster.hot_nodes())
    moves = [move for plan in plans for move in plan.moves]
    reclaimed: Counter[str] = Counter()
    charged: Counter[str] = Counter()
    for move in moves:
        assert move.target in inputs.classes.targets
        assert move.source in inputs.classes.hot
        reclaimed[move.target] += move.candidate.parsed.reclaimed.millicpu
        charged[move.target] += round(move.candidate.usage[0])
    for name in {move.target for move in moves}:
        assert reclaimed[name] <= offered
        assert inputs.loads[name].usage[0] + charged[name] <= 0.5 * CAPACITY[0] + 1, "50 % is the high threshold"
        assert charged[name] <= planner.added_usage(name)[0] + 1
    assert len(moves) <= total
    for key, limit in (
        (lambda move: move.source, per_node),
        (lambda move: move.candidate.pod.metadata.namespace, per_namespace),
        (lambda move: move.candidate.workload, per_workload),
    ):
        assert max(Counter(map(key, moves)).values(), default=0) <= limit
    for plan in plans:
        kinds = [move.candidate.parsed.is_reclaimed for move in plan.moves]
        assert kinds == sorted(kinds, reverse=True), "reclaimed pods are moved first"
    assert cluster.state.assumptions == {}
