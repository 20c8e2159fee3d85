"""The stock Katalyst agent as a peer over the real sockets: its QRM plugins apply dioptase's advice, dioptase's QRM applies
Katalyst's advice, and Katalyst's reporter publishes data of dioptase's reporter plugin.

Katalyst's CPU plugin does not start on fewer CPUs than it reserves for reclaimed pods, so both see a machine of eight CPUs,
whose pods do not run. Katalyst's writes to cgroups are not checked here.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.binaries import Missing
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import wait
from tests.cluster.server import Server
from tests.cluster.side_by_side import ADVISED, CPUS, NODE, ROOT_FLAG, found_by_orm, stand, start_ours
from tests.cluster.stock_katalyst import (
    ADVISOR,
    CNRS,
    DIOPTASE,
    ORM,
    QRM,
    REPORTER,
    KatalystAndDioptase,
    obtain_katalyst,
)

pytestmark = pytest.mark.katalyst


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        return obtain_katalyst()
    except Missing as error:
        pytest.skip(str(error))


@pytest.fixture
def side_by_side(own_cluster: Cluster, definitions: Server, program: Path) -> Iterator[KatalystAndDioptase]:
    with stand(own_cluster, program) as created:
        yield created


KATALYST_ONLY = {
    "": "its CPU flags have no name",
    "nbw": "-1 of a card that has no speed; ours leaves out what is not known",
    "cis": "instruction sets",
    "topology": "network cards, as texts of JSON",
}
"""Properties that the stock agent alone has, as docs/katalyst-differences.md explains."""
OF_CARDS = ("Name", "PCIAddr", "NumaNode", "Speed", "Enable")
OURS_ALONE = {"cpu_codename": "theirs comes with metrics, which its reporter cannot wait for", "is_vm": "likewise"}


def properties(cnr: dict[str, Any]) -> dict[str, Any]:
    """Return the properties' values by name, quantities as numbers."""
    listed = cnr["spec"]["nodeResourceProperties"]
    return {
        item["propertyName"]: number(item["propertyQuantity"])
        if "propertyQuantity" in item
        else item.get("propertyValues")
        for item in listed
    }


def comparable(result: dict[str, Any], names: Set[str]) -> dict[str, Any]:
    """Return the properties of these names, without the differences in docs/katalyst-differences.md and without indices and
    addresses of network cards, which differ in the cluster's network namespace."""
    values = {name: result[name] for name in names}
    if "cis" in values:
        values["cis"] = sorted(set(values["cis"]) - {"avx512"})
    if "topology" in values:
        cards = [json.loads(text) for text in values["topology"]]
        values["topology"] = sorted([card[key] for key in OF_CARDS] for card in cards if card["PCIAddr"])
    return values


def number(quantity: str) -> int:
    return int(quantity.removesuffix("Ki")) * (1024 if quantity.endswith("Ki") else 1)


def zones(cnr: dict[str, Any]) -> set[tuple[str, str]]:
    """Return types and names of the zones, down to NUMA nodes."""
    sockets = cnr["status"]["topologyZone"]
    return {(zone["type"], zone["name"]) for socket in sockets for zone in (socket, *socket["children"])}


def amounts(cnr: dict[str, Any], what: str) -> dict[str, int]:
    """Return CPU and memory of the single NUMA node; memory is rounded, because this machine's use varies."""
    (socket,) = cnr["status"]["topologyZone"]
    result = socket["children"][0]["resources"][what]
    return {"cpu": number(result["cpu"]), "memory in 4 GiB": round(number(result["memory"]) / (4 << 30))}


def pools(side_by_side: KatalystAndDioptase) -> dict[str, int]:
    """Return dioptase's sizes of the pools share and reclaim."""
    metrics = side_by_side.metrics()
    return {name: int(metrics[f'dioptase_pool_cpus{{pool="{name}"}}']) for name in ("share", "reclaim")}


def size(text: str) -> int:
    """Return the number of CPUs in a list."""
    parts = [part.split("-") for part in text.split(",") if part]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in parts)


def given(side_by_side: KatalystAndDioptase) -> dict[str, int]:
    """Return the sizes of share and reclaim in the state file of Katalyst's CPU plugin."""
    entries = side_by_side.state("cpu")["pod_entries"]
    return {name: size(entries[name][""]["allocation_result"]) for name in ("share", "reclaim") if name in entries}


def owners(side_by_side: KatalystAndDioptase) -> dict[str, str]:
    """Return the pools of the pods that Katalyst's ORM admitted."""
    entries = side_by_side.state("cpu")["pod_entries"].values()
    return {entry["main"]["pod_name"]: entry["main"]["owner_pool_name"] for entry in entries if "main" in entry}


def test_a_stock_qrm_plugin_applies_our_advice(side_by_side: KatalystAndDioptase) -> None:
    start_ours(side_by_side, serve=["advisor"])
    side_by_side.start_stock("katalyst-qrm", [ORM, *QRM], *ADVISED, ROOT_FLAG, found_by_orm(side_by_side))
    request = 'dioptase_advice_age_seconds{direction="given",resource="%s"}'
    wait("advice", lambda: {request % kind for kind in ("cpu", "memory")} <= side_by_side.metrics().keys(), 60)
    wait("their pools", lambda: given(side_by_side) == pools(side_by_side), 30)
    # Its own rule would have put every CPU that no request needs into reclaim: 7 of 8.
    assert given(side_by_side) == pools(side_by_side) != {"share": 1, "reclaim": 7}
    assert sum(given(side_by_side).values()) == CPUS
    wait("its pods", lambda: owners(side_by_side) == {"web": "share", "batch": "reclaim"}, 60)
    metrics = side_by_side.metrics()
    assert metrics['dioptase_protocol_peers{role="qrm-plugin"}'] == 2
    refused = [name for name in metrics if "calls_total" in name and "GetAdvice" in name and 'code="OK"' not in name]
    assert refused == []
    for complaint in ("get advice from cpu advisor failed", "handle control knob failed"):
        assert complaint not in side_by_side.log("katalyst-qrm")


def test_our_qrm_applies_the_advice_of_a_stock_advisor(side_by_side: KatalystAndDioptase) -> None:
    start_ours(side_by_side, take=["cpu", "memory"])
    alone = pools(side_by_side)
    side_by_side.start_stock("katalyst-advisor", [ADVISOR], ROOT_FLAG)
    trusted = 'dioptase_protocol_peers{role="advisor"}'
    wait("both to be trusted", lambda: side_by_side.metrics()[trusted] == 2, 90)
    # Its share pool has 4 CPUs at least; ours received 2.
    wait("their sizes", lambda: pools(side_by_side) != alone, 30)
    assert alone == {"share": 2, "reclaim": 6}
    assert pools(side_by_side) == {"share": 4, "reclaim": 4}


def test_a_stock_reporter_publishes_what_ours_tells(side_by_side: KatalystAndDioptase, definitions: Server) -> None:
    """With metrics it waits for those before it lets them begin, so it runs without: what it says comes by our socket."""
    start_ours(side_by_side, "--node", NODE, serve=["pod-resources"])
    wait("our zones", lambda: side_by_side.cnr()["status"]["topologyZone"], 30)
    mine = side_by_side.cnr()
    side_by_side.cluster.daemons.end(DIOPTASE, signal.SIGTERM)
    definitions.ask("DELETE", f"{CNRS}/{side_by_side.name}")
    start_ours(side_by_side, serve=["pod-resources"])
    side_by_side.start_stock("katalyst-reporter", [REPORTER], "--enable-metrics-fetcher=false")
    wait("their zones", lambda: side_by_side.cnr()["status"]["topologyZone"], 60)
    result = side_by_side.cnr()
    own_cluster, other = properties(mine), properties(result)
    both = own_cluster.keys() & other.keys()
    assert comparable(own_cluster, both) == comparable(other, both)
    assert both >= {"numa", "cpu", "memory"}
    assert other.keys() - both <= KATALYST_ONLY.keys()
    assert own_cluster.keys() - both <= OURS_ALONE.keys()
    assert zones(mine) == zones(result) == {("Socket", "0"), ("Numa", "0")}
    for what in ("capacity", "allocatable"):
        assert amounts(mine, what) == amounts(result, what)
        assert amounts(mine, what)["cpu"] == CPUS
    assert mine["status"]["topologyPolicy"].lower() == result["status"]["topologyPolicy"].lower()
    definitions.ask("DELETE", f"{CNRS}/{side_by_side.name}")
