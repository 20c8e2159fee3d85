"""`dioptase explain` of pods, pools, regions and memory, which have no single decision."""

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
from cli.explain.answer import Explanation, explain_target, known_targets
from cli.explain.report import explanation_text
from exporters.view.cycle_view import build_view
from tests.agent.advisor.memory.builders import situation
from tests.builders import colocation_run
from tests.builders.pods import dedicated

DB = dedicated("db", cpu_request=1.0, problems=("annotation x: is not y; write z",))
CANONICAL = colocation_run.simulate_run(40, others=(DB,), config=AgentConfig(advisor=AdvisorConfig(policy="canonical")))
LAST = CANONICAL.rounds[-1]
LATER_NS = LAST.snapshot.wall_time_ns + colocation_run.S


def explanation_of(target: str | None, last: Cycle = LAST) -> Explanation:
    return explain_target(target, build_view(last), CANONICAL.entries, last.snapshot, LATER_NS)


def text_of(target: str | None, last: Cycle = LAST) -> str:
    return flat(explanation_text(explanation_of(target, last), LATER_NS, 100))


def flat(lines: Iterable[str]) -> str:
    return " ".join(" ".join(lines).split())


def test_a_pod_is_shown_with_its_region_and_the_reason_of_its_size() -> None:
    assert LAST.advice is not None
    (share,) = [region for region in LAST.advice.cpu.regions if region.region.name == "share"]
    text = text_of("web")
    # web, and db, whose request for exclusive CPUs was rejected
    assert "region share: 2 pods of kind share on pool share" in text
    assert f"because {share.reason.text}" in text
    assert f"rule provision_canonical, threshold {share.upper_cores:g}" in text
    assert f"estimate_cores {share.reason.inputs['estimate_cores']:g} (from cgroups)" in text
    assert "level shared_cores" in text


def test_a_rejected_request_of_a_pod_has_its_reason() -> None:
    (result,) = explanation_of("default/db").pods
    assert result.rejected is not None
    assert result.rejected.rule == "dedicated_needs_numa_binding"
    text = text_of("default/db")
    assert "rejected it does not get the CPUs that it requests" in text
    assert f"because {result.rejected.text} rule dedicated_needs_numa_binding" in text
    assert "problem annotation x: is not y; write z" in text


def test_a_pod_has_its_share_of_a_network_card_or_the_reason_of_a_rejection() -> None:
    card = NicBandwidth(
        name="eth0",
        speed=1000,
        egress_capacity=940,
        ingress_capacity=900,
        allocated_mbit=850,
        pods={"default/web": 250},
    )
    rejection = "No network card has 90 Mbit/s left in both directions: eth0 50 of 900."
    full = Reason(rule=NO_BANDWIDTH, text=rejection, threshold=90)
    advice = msgspec.structs.replace(LAST.advice, cards=(card,), rejected={"default/batch": full})
    last = msgspec.structs.replace(LAST, advice=advice)
    text = text_of("web", last)
    assert "network 250 Mbit/s of eth0 in each direction are guaranteed; 850 of 900 Mbit/s of it are guaranteed" in text
    text = text_of("batch", last)
    assert "rejected it gets no guarantee of the network bandwidth that it requests" in text
    assert f"because {full.text} rule no_bandwidth, threshold 90" in text


def test_without_a_target_only_pods_with_problems_are_listed() -> None:
    assert [pod.pod for pod in explanation_of(None).pods] == ["default/db"]


@pytest.mark.parametrize(("target", "pools"), [("share", ["share"]), ("reclaim", ["reclaim"]), ("cpu.max", [])])
def test_pools_are_listed_by_pool_and_region(target: str, pools: list[str]) -> None:
    assert [pool.name for pool in explanation_of(target).pools] == pools


def test_sizes_of_disjoint_pools_add_up_to_the_node() -> None:
    result = {pool.name: pool for pool in explanation_of(None).pools}
    assert sum(size.cpus for pool in result.values() for size in pool.sizes) == colocation_run.CPUS
    assert result["share"].lending is None
    assert result["reclaim"].lending is not None
    size = result["share"].sizes[0].cpus
    assert f"size {size} CPUs" in text_of("share")
    assert "cores may be used" not in text_of("share"), "only the reclaim pool has reclaimable CPU"


def test_a_region_is_a_target_by_its_name() -> None:
    view = build_view(LAST)
    renamed = msgspec.structs.replace(
        view.regions[0], region=msgspec.structs.replace(view.regions[0].region, name="share-NUMA0")
    )
    view = msgspec.structs.replace(view, regions=(renamed,))
    result = explain_target("share-NUMA0", view, CANONICAL.entries, LAST.snapshot, LATER_NS)
    assert [pool.name for pool in result.pools] == ["share"]
    assert known_targets(view, ())["regions"] == ["share-NUMA0"]


def test_memory_has_headroom_shortage_and_reasons() -> None:
    advice, _ = advise_memory(situation(), MemoryAdvisorState(), MemoryConfig())
    assert advice.headroom_bytes is not None
    last = msgspec.structs.replace(LAST, memory=advice)
    text = text_of("memory", last)
    assert f"because {advice.headroom_reason.text}" in text
    assert f"condition {advice.condition.state.value}: {advice.condition.reason.text}" in text
    assert "(from files of the node, up to 5 s old)" in text
    assert "(from files of cgroups, up to 5 s old)" in text
    assert explanation_of("memory", last).knobs == ()
    assert "Memory headroom for reclaimed pods" in text_of("reclaim", last)
    assert "Memory headroom for reclaimed pods" not in text_of("share", last)


def test_unknown_memory_is_not_zero() -> None:
    text = text_of("memory")
    assert "Memory headroom for reclaimed pods: not known" in text
    assert "condition unknown: The memory pressure of the node is not known: the node's memory is missing." in text


def test_the_reclaim_pool_has_the_headroom_and_the_reported_headroom() -> None:
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
    text = text_of("reclaim", last)
    cores = LAST.advice.headroom.cores
    assert f"headroom {cores:.2f} cores for all reclaimed pods together" in text
    assert f"because {LAST.advice.headroom.reason.text} rule pool_supply" in text
    assert "reported 3.50 cores and 3.00 GiB to the scheduler" in text
    assert "NUMA node 0 2.50 cores and 2.00 GiB; NUMA node 1 1.00 cores and 1.00 GiB" in text
    assert "inputs have been missing for 400 s. rule stale_decayed" in text
    assert "leaves Region share leaves" in text_of("share", last)
