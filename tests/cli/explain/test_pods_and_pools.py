"""`dioptase explain` of what stands behind no single decision: pods, pools, regions and memory."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from agent.advisor.memory.memory_advisor import advise_memory
from agent.advisor.memory.memory_inputs import MemoryAdvisorState
from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.config.memory import MemoryConfig
from api.advice import NO_BANDWIDTH, Headroom, NicBandwidth
from api.decision import Cycle
from api.knobs import Reason
from api.pod import Container, Pod
from api.qos import QoSLevel
from cli.explain.answer import Explanation, explain_target, known_targets
from cli.explain.report import explanation_text
from exporters.view.cycle_view import build_view
from tests.agent.advisor.memory.builders import situation
from tests.builders import colocation_run

DB = Pod(
    uid="default/db", namespace="default", name="db", qos=QoSLevel.DEDICATED, problems=("annotation x: is not y; write z",),
    containers=(Container(name="db", cgroup="/db", cpu_request_cores=1.0),),
)  # fmt: skip
CANONICAL = colocation_run.simulate_run(40, others=(DB,), config=AgentConfig(advisor=AdvisorConfig(policy="canonical")))
LAST = CANONICAL.rounds[-1]
LATER_NS = LAST.snapshot.wall_time_ns + colocation_run.S


def asked(target: str | None, last: Cycle = LAST) -> Explanation:
    return explain_target(target, build_view(last), CANONICAL.entries, last.snapshot, LATER_NS)


def told(target: str | None, last: Cycle = LAST) -> str:
    return flat(explanation_text(asked(target, last), LATER_NS, 100))


def flat(lines: Iterable[str]) -> str:
    return " ".join(" ".join(lines).split())


def test_a_pod_is_told_with_its_region_and_how_that_came_to_its_size() -> None:
    assert LAST.advice is not None
    (share,) = [one for one in LAST.advice.cpu.regions if one.region.name == "share"]
    said = told("web")
    # web, and db, which was refused CPUs of its own
    assert "region share: 2 pods of kind share on pool share" in said
    assert f"because {share.reason.text}" in said
    assert f"rule provision_canonical, threshold {share.upper_cores:g}" in said
    assert f"estimate_cores {share.reason.inputs['estimate_cores']:g} (from cgroups)" in said
    assert "level shared_cores" in said


def test_a_pod_whose_wish_cannot_be_fulfilled_says_why_it_cannot() -> None:
    (found,) = asked("default/db").pods
    assert found.rejected is not None
    assert found.rejected.rule == "dedicated_needs_numa_binding"
    said = told("default/db")
    assert "rejected it does not have the CPUs that it asks for" in said
    assert f"because {found.rejected.text} rule dedicated_needs_numa_binding" in said
    assert "problem annotation x: is not y; write z" in said


def test_a_pod_is_told_its_part_of_a_network_card_or_that_none_has_enough() -> None:
    card = NicBandwidth(
        name="eth0", speed=1000, egress_capacity=940, ingress_capacity=900, promised=850, pods={"default/web": 250}
    )
    full = Reason(rule=NO_BANDWIDTH, text="No card has 90 Mbit/s left both ways: eth0 50 of 900.", threshold=90)
    advice = msgspec.structs.replace(LAST.advice, cards=(card,), rejected={"default/batch": full})
    last = msgspec.structs.replace(LAST, advice=advice)
    said = told("web", last)
    assert "network 250 Mbit/s of eth0 are promised to it; of 900 that can be promised both ways 850 are" in said
    said = told("batch", last)
    assert "rejected it is not promised the network bandwidth that it asks for" in said
    assert f"because {full.text} rule no_bandwidth, threshold 90" in said


def test_whoever_asks_for_everything_hears_of_pods_in_trouble_and_of_no_other() -> None:
    assert [pod.pod for pod in asked(None).pods] == ["default/db"]


@pytest.mark.parametrize(("target", "pools"), [("share", ["share"]), ("reclaim", ["reclaim"]), ("cpu.max", [])])
def test_pools_are_told_with_sizes_and_regions(target: str, pools: list[str]) -> None:
    assert [pool.name for pool in asked(target).pools] == pools


def test_sizes_of_pools_add_up_to_the_node_where_they_are_apart() -> None:
    found = {pool.name: pool for pool in asked(None).pools}
    assert sum(size.cpus for pool in found.values() for size in pool.sizes) == colocation_run.CPUS
    assert found["share"].lending is None
    assert found["reclaim"].lending is not None
    size = found["share"].sizes[0].cpus
    assert f"size {size} CPUs" in told("share")
    assert "cores may be used" not in told("share"), "what is lent is of the reclaim pool alone"


def test_a_region_is_asked_for_by_its_name() -> None:
    view = build_view(LAST)
    renamed = msgspec.structs.replace(
        view.regions[0], region=msgspec.structs.replace(view.regions[0].region, name="share-NUMA0")
    )
    view = msgspec.structs.replace(view, regions=(renamed,))
    found = explain_target("share-NUMA0", view, CANONICAL.entries, LAST.snapshot, LATER_NS)
    assert [pool.name for pool in found.pools] == ["share"]
    assert known_targets(view, ())["regions"] == ["share-NUMA0"]


def test_memory_says_what_is_promised_how_short_it_is_and_why() -> None:
    advice, _ = advise_memory(situation(), MemoryAdvisorState(), MemoryConfig())
    assert advice.headroom_bytes is not None
    last = msgspec.structs.replace(LAST, memory=advice)
    said = told("memory", last)
    assert f"because {advice.headroom_reason.text}" in said
    assert f"condition {advice.condition.state.value}: {advice.condition.reason.text}" in said
    assert "(from files of the node, up to 5 s old)" in said
    assert "(from files of cgroups, up to 5 s old)" in said
    assert asked("memory", last).knobs == ()
    assert "Memory can be promised" in told("reclaim", last)
    assert "Memory can be promised" not in told("share", last)


def test_memory_that_is_not_known_is_not_called_nothing() -> None:
    said = told("memory")
    assert "Memory can be promised to reclaimed pods: not known" in said
    assert "condition unknown: The memory pressure of the node is not known" in said


def test_the_reclaim_pool_tells_what_is_promised_and_what_the_node_advertises_of_it() -> None:
    two = Headroom(
        cores=3.5,
        cores_by_numa={0: 2.5, 1: 1.0},
        memory_bytes=3.0 * (1 << 30),
        memory_by_numa={0: 2.0 * (1 << 30), 1: 1.0 * (1 << 30)},
        reason=Reason(rule="stale_decayed", text="CPU: 3.50 cores reported; inputs have been missing for 400 s."),
    )
    assert LAST.advice is not None
    assert LAST.advice.headroom is not None
    last = msgspec.structs.replace(LAST, advice=msgspec.structs.replace(LAST.advice, reported_headroom=two))
    said = told("reclaim", last)
    cores = LAST.advice.headroom.cores
    assert f"headroom {cores:.2f} cores can be promised to reclaimed pods in all" in said
    assert f"because {LAST.advice.headroom.reason.text} rule pool_supply" in said
    assert "advertised 3.50 cores and 3.00 GiB by the node, to whoever schedules" in said
    assert "NUMA node 0 2.50 cores and 2.00 GiB; NUMA node 1 1.00 cores and 1.00 GiB" in said
    assert "inputs have been missing for 400 s. rule stale_decayed" in said
    assert "leaves Region share leaves" in told("share", last)
