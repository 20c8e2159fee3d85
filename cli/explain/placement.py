"""`dioptase explain POD --scheduler URL`: asks the scheduler extender where a pod fits, and prints its answer."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote as quote_url
from urllib.parse import urlsplit

import click
import msgspec

from api.interfaces import Unavailable
from api.placement import NodePlacement, PlacementExplanation
from api.quantity import format_count
from api.text import printable
from cli.client import AgentClient, RequestedServer
from common.http.request_guard import is_loopback

DEFAULT_NAMESPACE = "default"
EXTENDER = RequestedServer(
    "scheduler extender", "name a running one with --scheduler, such as http://127.0.0.1:9317; see docs/scheduler.md"
)


def explain_pod_placement(target: str | None, url: str, *, as_json: bool) -> int:
    """Print where a pod fits and where not; return the exit status. Raises UsageError without a pod, and Unavailable."""
    if target is None:
        raise click.UsageError("--scheduler needs a pod, as NAMESPACE/NAME")
    key = target if "/" in target else f"{DEFAULT_NAMESPACE}/{target}"
    # The chart's certificate has the name of its Service, and on loopback only programs of this machine can answer.
    host = urlsplit(url).hostname or ""
    verify = host != "localhost" and not is_loopback(host)
    body = AgentClient(url, timeout_s=10, verify=verify, server=EXTENDER).read(
        f"/explain?pod={quote_url(key, safe='')}"
    )
    if as_json:
        click.echo(body.decode())
        return 0
    try:
        explanation = msgspec.json.decode(body, type=PlacementExplanation)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unavailable(f"{url} is no scheduler extender: {error}", "name its address with --scheduler") from error
    for line in placement_lines(explanation):
        click.echo(printable(line))
    return 0


def placement_lines(explanation: PlacementExplanation) -> Iterator[str]:
    """Yield the explanation as text: the result first, then every node with the numbers of each plugin."""
    where = f"is on {explanation.node}" if explanation.node else "is pending"
    if explanation.assumed:
        where = "is being bound"
    yield f"{explanation.pod} ({explanation.level}) {where}."
    if explanation.gang:
        yield f"{explanation.gang}."
    if explanation.problem:
        yield f"It cannot be placed: {explanation.problem}"
        return
    yield f"It fits {explanation.fitting} of {format_count(explanation.node_count, 'node')}."
    for reason, count in explanation.rejections.items():
        yield f"  {count:5d} rejected: {reason}"
    for node in explanation.nodes:
        yield ""
        yield from _node_lines(node, is_own=node.node == explanation.node)
    if hidden := explanation.node_count - len(explanation.nodes):
        yield ""
        yield f"{format_count(hidden, 'other node')} not shown; the counts above include them"


def _node_lines(node: NodePlacement, *, is_own: bool) -> Iterator[str]:
    own = ", without this pod" if is_own else ""
    yield f"{node.node}{own}: " + (f"fits, score {node.score:g} of 100" if node.fits else "does not fit")
    for verdict in node.verdicts:
        score = "" if verdict.score is None else f" [{verdict.score:g} x {verdict.weight:g}]"
        rejection = f"REJECTS: {verdict.rejection}; " if verdict.rejection else ""
        yield f"  {verdict.plugin}{score}: {rejection}{verdict.numbers}"
