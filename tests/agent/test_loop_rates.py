"""Rates are computed once per cycle: the policies, the NRI preview and the sinks share them."""

from __future__ import annotations

import msgspec
import pytest

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.advisor.preview import preview_decisions
from agent.config.config import AgentConfig
from agent.reporter.cnr import node_metric_status
from api import rates
from api.qos import QoSLevel
from api.rates import NodeRates, Rates, rates_since, with_busy_limit
from api.snapshot import KubeletManagers, Snapshot
from exporters.prometheus.families import MetricsState, metric_families
from exporters.view.cycle_view import build_view
from tests.agent.advisor.builders import S, pod
from tests.agent.test_loop import Scripted, loop_over, small_snapshot
from tests.builders.four_cpu_node import busy_snapshot

EVERYTHING = msgspec.convert(
    {
        "advisor": {"policy": "none"},
        "shadow": {"policy": "latency"},
        "knobs": {"suppress": {"policy": "cfsQuota"}},
        "power": {"enable": True},
        "overcommit": {"enable": True},
    },
    AgentConfig,
)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The intervals in nanoseconds for which rates were computed."""
    intervals: list[int] = []
    compute = rates._node_rates

    def count(previous: Snapshot, current: Snapshot, interval_ns: int) -> NodeRates:
        intervals.append(interval_ns)
        return compute(previous, current, interval_ns)

    monkeypatch.setattr(rates, "_node_rates", count)
    return intervals


@pytest.mark.parametrize("config", [AgentConfig(), EVERYTHING])
async def test_a_cycle_computes_rates_once(config: AgentConfig, computed: list[int]) -> None:
    script = Scripted(small_snapshot)
    loop = loop_over(script, config)
    for cycles in range(3):
        finished = loop.run_cycle("tick")
        assert [source.name for source in finished.snapshot.sources] == [], "no part of the cycle failed"
        build_view(finished)
        list(metric_families(MetricsState(version="1", latest=finished)))
        node_metric_status(finished)
        assert loop.preview_inputs is not None
        preview_decisions(loop.preview_inputs, [pod("new", QoSLevel.RECLAIMED)], "/new")
        assert computed == [S] * cycles


async def test_a_cycle_after_a_failed_one_has_the_rates_since_the_last_evaluated_snapshot(computed: list[int]) -> None:
    script = Scripted(small_snapshot)
    loop = loop_over(script)
    loop.run_cycle("tick")
    script.see = lambda seq: msgspec.structs.replace(small_snapshot(seq), pods=None)
    assert not loop.run_cycle("tick").snapshot.sources[0].ok
    script.see, before = small_snapshot, len(computed)
    finished = loop.run_cycle("tick")
    assert computed[before:] == [S, 2 * S], "the sinks have the last second, the advisor both"
    assert finished.rates is not None
    assert finished.rates.node.interval_ns == S


@pytest.mark.parametrize("config", [AgentConfig(), EVERYTHING])
def test_shared_rates_give_the_results_of_rates_that_the_policy_computes(config: AgentConfig) -> None:
    """The kubelet has made two of four CPUs exclusive, so that the policy's node has fewer CPUs than the shared rates'."""
    shared_state = own_state = PolicyState()
    previous: Snapshot | None = None
    for seq in range(1, 4):
        snapshot = busy_snapshot(seq)
        exclusive = KubeletManagers(cpu="static", memory="none", exclusive={"u": {"main": (2, 3)}})
        snapshot = msgspec.structs.replace(snapshot, node=msgspec.structs.replace(snapshot.node, kubelet=exclusive))
        rates, now_ns = rates_since(previous, snapshot), snapshot.taken_at_ns
        shared, shared_state = evaluate_policy(snapshot, config, shared_state, now_ns, rates=rates)
        own, own_state = evaluate_policy(snapshot, config, own_state, now_ns)
        assert shared == own
        previous = snapshot
    assert rates is not None
    assert rates.node.busy_cores is not None


def test_rates_belong_to_the_snapshots_of_their_cycle() -> None:
    loop = loop_over(Scripted(small_snapshot))
    loop.run_cycle("tick")
    finished = loop.run_cycle("tick")
    assert finished.rates is not None
    assert "/web" in finished.rates.cgroups
    changed = msgspec.structs.replace(finished, snapshot=msgspec.structs.replace(finished.snapshot, cgroups={}))
    assert changed.rates is not None
    assert changed.rates.cgroups == {}
    assert msgspec.structs.replace(finished, previous=None).rates is None
    assert "rates" not in msgspec.to_builtins(finished), "recordings do not hold them"


def test_known_rates_are_used_only_for_their_interval() -> None:
    first, second, third = (msgspec.structs.replace(small_snapshot(seq), boot_id="b") for seq in (1, 2, 3))
    shared = Rates(node=NodeRates(interval_ns=S, busy_cores=9.0), cgroups={})
    assert rates_since(second, third, shared) is shared
    since_first = rates_since(first, third, shared)
    assert since_first is not None
    assert (since_first.node.interval_ns, since_first.node.busy_cores) == (2 * S, None)
    assert rates_since(None, third, shared) is None


@pytest.mark.parametrize(
    ("busy_cores", "cpus", "limited"), [(3.5, 2, 2.0), (1.5, 2, 1.5), (3.5, 0, 3.5), (None, 2, None)]
)
def test_busy_cores_are_at_most_the_cpus_that_count(busy_cores: float | None, cpus: int, limited: float | None) -> None:
    result = with_busy_limit(Rates(node=NodeRates(interval_ns=S, busy_cores=busy_cores), cgroups={}), cpus)
    assert result is not None
    assert result.node.busy_cores == limited


def test_sinks_show_the_latency_that_the_policy_evaluated() -> None:
    """Of a container with exclusive CPUs of the kubelet none is evaluated, and without a policy none at all."""

    def with_exclusive_cpus(seq: int) -> Snapshot:
        snapshot = busy_snapshot(seq)
        uid = next(pod.uid for pod in snapshot.pods if pod.qos is not QoSLevel.RECLAIMED)
        exclusive = KubeletManagers(cpu="static", memory="none", exclusive={uid: {"web": (3,)}})
        return msgspec.structs.replace(snapshot, node=msgspec.structs.replace(snapshot.node, kubelet=exclusive))

    shown = {}
    for name, see, policy in (
        ("all", busy_snapshot, "latency"),
        ("exclusive", with_exclusive_cpus, "latency"),
        ("none", busy_snapshot, "none"),
    ):
        config = msgspec.convert({"advisor": {"policy": policy}}, AgentConfig)
        loop = loop_over(Scripted(see), config)
        loop.run_cycle("tick")
        finished = loop.run_cycle("tick")
        view = build_view(finished)
        shown[name] = {each.cgroup for each in view.containers if each.evaluated_wait is not None}
        assert shown[name] == {path for path, wait in finished.evaluated_latency.items() if wait is not None}
    assert shown == {"all": {"/web"}, "exclusive": set(), "none": set()}
