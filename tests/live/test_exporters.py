"""The agent as a process with everything that it can hand out: TLS and a password, a recording, OpenTelemetry."""

from __future__ import annotations

import base64
import json
import ssl
import urllib.request
from pathlib import Path

import bcrypt
import msgspec
import pytest

from api.snapshot import Snapshot
from exporters.recording.segments import read_recording
from tests.builders.waiting import until
from tests.exporters.certificates import Authority
from tests.exporters.otel.otlp_receivers import HttpCollector
from tests.live.agent_process import Agent, pods_file

pytestmark = pytest.mark.live


def test_a_wrong_variable_of_opentelemetry_costs_what_it_is_about_and_is_seen(tmp_path: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}
    result = "OTEL_EXPORTER_OTLP_TIMEOUT is 'soon'"
    with Agent("--state-dir", str(tmp_path / "state"), env=env) as agent:
        agent.view()
        (failed,) = (s for s in json.loads(agent.get("/healthz"))["failed"] if s["source"] == "opentelemetry")
        text = agent.get("/metrics")
        assert agent.end() == 0, agent.log
    assert failed == {"source": "opentelemetry", "error": result, "remedy": "write milliseconds, from 100 to 86400000"}
    assert 'dioptase_source_up{source="opentelemetry",detail="off"} 0\n' in text
    assert f"ERROR nothing is sent to OpenTelemetry: {result}: write milliseconds" in agent.log
    assert "Traceback" not in agent.log


def test_one_agent_serves_by_tls_records_and_sends(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("server")
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(8)).decode()
    web = tmp_path / "web.yml"
    web.write_text(f"""
tls_server_config: {{cert_file: server.crt, key_file: server.key}}
basic_auth_users: {{me: "{hashed}"}}
""")
    context = ssl.create_default_context(cafile=str(authority.certificate))
    header = {"Authorization": "Basic " + base64.b64encode(b"me:secret").decode()}
    collector = HttpCollector()
    options = (
        "--pods", str(pods_file(tmp_path / "pods.yaml", "/nowhere-web", "/nowhere-batch")),
        "--state-dir", str(tmp_path / "state"), "--act", "off",
        "--web-config", str(web), "--record", str(tmp_path / "recording"),
    )  # fmt: skip
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}", "OTEL_BSP_SCHEDULE_DELAY": "200",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_METRIC_EXPORT_INTERVAL": "500",
    }  # fmt: skip
    try:
        with Agent(*options, env=env) as agent:
            until(lambda: "metrics on https://127.0.0.1:" in agent.log, lambda: f"it says where: {agent.log}")
            url = agent.log.partition("metrics on ")[2].split()[0].replace("127.0.0.1", "localhost")

            def get(path: str) -> bytes:
                request = urllib.request.Request(url + path, headers=header)
                with urllib.request.urlopen(request, timeout=5, context=context) as answer:
                    return bytes(answer.read())

            until(lambda: b"\ndioptase_recording_rounds_total 4\n" in get("/metrics"), "four rounds are recorded", 30)
            text = get("/metrics").decode()
            assert "\ndioptase_recording_writable 1\n" in text
            assert 'dioptase_source_up{source="recording",detail="zlib"} 1\n' in text
            assert "\ndioptase_otel_failures_total 0\n" in text
            snapshot = msgspec.json.decode(get("/api/v1/snapshot"), type=Snapshot)
            span = collector.traces.get(timeout=20).scope_spans[0].spans[0]
            names = {metric.name for metric in collector.metrics.get(timeout=20).scope_metrics[0].metrics}
            assert agent.end() == 0, agent.log
    finally:
        collector.stop()
    assert span.name == "round"
    assert "dioptase.node.cpus" in names
    damage: list[str] = []
    rounds = {
        r.snapshot.seq: r for r in read_recording(tmp_path / "recording", lambda _path, what: damage.append(what))
    }
    assert damage == []
    assert list(rounds) == list(range(1, len(rounds) + 1))
    assert rounds[snapshot.seq].snapshot == snapshot, "what was served is what was recorded"
    assert rounds[2].previous == rounds[1].snapshot
