"""The `dioptase explain` command: fetches an agent's data and prints the explanation as text or JSON.
Shared with `kubectl dioptase explain`, so it must not import Linux-only modules.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence

import click

from api.decision import JournalEntry
from api.eviction import EvictionEntry
from api.interfaces import Unavailable
from api.snapshot import Snapshot
from api.text import to_json
from cli.client import AgentClient
from cli.explain.answer import explain_target, known_targets
from cli.explain.placement import explain_pod_placement
from cli.explain.report import explanation_text, unknown_target_text
from cli.options import exit_unavailable, url_option
from exporters.view.cycle_view import View


@click.command()
@click.argument("target", required=False, metavar="[POD|CGROUP|KNOB|POOL|REGION|PLUGIN|memory|#EVENT]")
@url_option
@click.option(
    "--scheduler",
    metavar="URL",
    default="",
    help="Address of a scheduler extender, such as http://127.0.0.1:9317: explain where the pod NAMESPACE/NAME fits.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain(target: str | None, url: str, scheduler: str, as_json: bool) -> None:
    """Explain a knob, pod, pool or memory: the decision, its rule, threshold and inputs, and their sources. For a pod also its
    evictions; for an eviction PLUGIN its thresholds. #EVENT is one decision by its number in the journal.

    Without a target: everything that the agent ever decided. Exits with 1 if nothing is known about the target.
    With --scheduler: why a pod is where it is, or why it is pending: each node's rejection and scores, with their numbers.
    """
    if scheduler:
        try:
            sys.exit(explain_pod_placement(target, scheduler, as_json=as_json))
        except Unavailable as error:
            exit_unavailable("explain", error)
    client = AgentClient(url, timeout_s=5)
    try:
        view, snapshot, entries = client.view(), client.snapshot(), client.decisions(limit=2000)
        evicted = [] if view.evictions is None else client.evictions(limit=2000)
    except Unavailable as error:
        exit_unavailable("explain", error)
    sys.exit(print_explanation(target, (view, snapshot, entries, evicted), as_json=as_json))


ExplainInputs = tuple[View, Snapshot, list[JournalEntry], list[EvictionEntry]]
"""The agent's data: its latest cycle and snapshot, its decisions and its evictions, oldest first."""


def has_data(target: str, inputs: ExplainInputs) -> bool:
    """Return whether the agent has anything about the target."""
    view, snapshot, entries, evicted = inputs
    return explain_target(target, view, entries, snapshot, time.time_ns(), evicted).has_content


def print_explanation(target: str | None, inputs: ExplainInputs, *, as_json: bool) -> int:
    """Print the explanation, or the valid targets if the target is unknown; return the exit status."""
    view, snapshot, entries, evicted = inputs
    now_ns = time.time_ns()
    explanation = explain_target(target, view, entries, snapshot, now_ns, evicted)
    if target is not None and not explanation.has_content:
        _print_lines(unknown_target_text(target, known_targets(view, entries)), err=True)
        return 1
    if as_json:
        click.echo(to_json(explanation).decode())
    else:
        _print_lines(explanation_text(explanation, now_ns, min(shutil.get_terminal_size().columns, 120)))
    return 0


def _print_lines(lines: Iterator[str] | Sequence[str], *, err: bool = False) -> None:
    for line in lines:
        click.echo(line, err=err)
