"""A real Prometheus for one test module, and every query that the dashboards and the rules ask."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from api.metrics import CONTROLLER_METRICS
from tests.builders import waiting

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
PATIENCE_S = 60
until = partial(waiting.until, seconds=PATIENCE_S)
OF_CONTROLLER = re.compile("|".join(metric.name for metric in CONTROLLER_METRICS))
COMPARISON = re.compile(r" (==|!=|<=|>=|<|>) ")
Labels = dict[str, str]


class Rule(msgspec.Struct):
    expr: str
    record: str = ""
    alert: str = ""
    annotations: dict[str, str] = {}


class RuleGroup(msgspec.Struct):
    name: str
    rules: list[Rule]


class RuleFile(msgspec.Struct):
    groups: list[RuleGroup]


def rules() -> list[Rule]:
    file = msgspec.yaml.decode((DASHBOARDS / "rules.yaml").read_bytes(), type=RuleFile)
    return [rule for group in file.groups for rule in group.rules]


def committed() -> list[Path]:
    """Every dashboard as it is imported."""
    return sorted(DASHBOARDS.glob("*.json"))


def panel_queries() -> Iterator[tuple[str, str]]:
    """Board, title and expression of every target of every panel."""
    for path in committed():
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.stem}: {panel['title']} ({target['refId']})", target["expr"]


def every_query(*, of_controller: bool = False) -> list[tuple[str, str]]:
    """Return the queries that agents (or the controller) must answer, with variables replaced as Grafana's "All" does. Of a
    rule's condition both sides are queried, whether it holds or not (`> bool`); its exception (`unless`) only if it is a
    recorded series."""
    request = [(name, filled(expr)) for name, expr in panel_queries()]
    for rule in rules():
        condition, _, excepted = rule.expr.partition("unless on ")
        assert not excepted or "dioptase:" in excepted, f"an exception that is not recorded: {rule.expr}"
        request.append((rule.record or rule.alert, COMPARISON.sub(r" \1 bool ", condition)))
    return [(name, expr) for name, expr in request if bool(OF_CONTROLLER.search(expr)) == of_controller]


def filled(expr: str) -> str:
    for variable in ("$node", "$namespace", "$pod", "$cgroup"):
        expr = expr.replace(f'"{variable}"', '".+"')
    expr = expr.replace("[$__rate_interval]", "[15s]")
    assert not re.search(r"\$[a-zA-Z_]", expr), f"a variable that this test does not know: {expr}"
    return expr


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def query(self, expr: str) -> list[tuple[Labels, float]]:
        """Every series of an instant query with its value; an error of the query fails the test with Prometheus' words."""
        form = urllib.parse.urlencode({"query": expr}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query", form, timeout=10) as answer:
                data = json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expr}\n{error.read().decode()}") from None
        return [(series["metric"], float(series["value"][1])) for series in data["result"]]

    def value(self, expr: str) -> float:
        """The one number that the query must answer with."""
        ((_, value),) = self.query(expr)
        return value


@contextmanager
def prometheus(binary: str, target: str, directory: Path, *options: str, scrape: str = "") -> Iterator[Prometheus]:
    """A Prometheus that scrapes HOST:PORT, or several with commas between, every second as job `dioptase`, and evaluates our
    rules; `scrape` are more lines."""
    target = ", ".join(f'"{item}"' for item in target.split(","))
    (directory / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{DASHBOARDS / "rules.yaml"}]
scrape_configs:
- job_name: dioptase
  static_configs: [{{targets: [{target}]}}]
{scrape}""")
    port = free_port()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [binary, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn", *options],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            server = Prometheus(port)
            until(lambda: server.ready() or process.poll() is not None)
            assert process.poll() is None, (directory / "log").read_text()
            yield server
        finally:
            process.terminate()
            process.wait(timeout=PATIENCE_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
