"""A server of 48 cores from its files: its zones, by number."""

from __future__ import annotations

from pathlib import Path

from agent.reporter.cnr import build_cnr_report
from agent.reporter.cnr_inputs import CnrInputs
from agent.sensors.node.machine import read_hardware
from api.decision import ActMode, Cycle
from api.pod import RECLAIMED_CPU
from api.units import GIB
from tests.agent.reporter import two_socket_server
from tests.agent.reporter.test_cnr import ADVERTISED, advice


def test_two_sockets_of_a_server(tmp_path: Path) -> None:
    two_socket_server.lay(tmp_path)
    cycle = Cycle(
        snapshot=two_socket_server.snapshot(tmp_path),
        previous=None,
        act=ActMode.ON,
        trigger="tick",
        advice=advice(ADVERTISED),
    )
    hardware = read_hardware(tmp_path / "proc", tmp_path / "sys")
    report = build_cnr_report(cycle, metrics=False, inputs=CnrInputs(hardware=hardware))
    properties = {prop.property_name: prop.property_quantity or prop.property_values for prop in report.properties}
    assert properties == {
        "numa": "2", "cpu": "48", "memory": str(384 * GIB), "cpu_codename": ("AMD_K19Zen4",), "is_vm": ("false",),
        "cis": ("avx2", "avx512"),
    }  # fmt: skip
    zones = report.status_body()["status"]["topologyZone"]
    assert [(zone["type"], zone["name"]) for zone in zones] == [("Socket", "0"), ("Socket", "1")]
    (first,), (second,) = (zone["children"] for zone in zones)
    assert (first["type"], first["name"], second["name"]) == ("Numa", "0", "1")
    assert first["resources"]["capacity"]["cpu"] == second["resources"]["capacity"]["cpu"] == "24"
    assert first["resources"]["allocatable"]["cpu"] == "23", "CPU 0 is of the reserve"
    assert first["resources"]["capacity"]["memory"] == str(192 * GIB)
    assert first["resources"]["allocatable"][RECLAIMED_CPU] == "2000"
    assert second["siblings"] == [
        {"type": "Numa", "name": "0", "attributes": [{"name": "numa_distance", "value": "32"}]}
    ]
    caches = [(child["type"], child["name"], child["attributes"][0]["value"]) for child in second["children"]]
    assert caches == [("L3CacheGroup", "2", "24-35"), ("L3CacheGroup", "3", "36-47")]
