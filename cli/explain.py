"""`dioptase explain`: why a knob is what it is, from the value in the kernel back to the measurements behind it."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence

import click

from api.decisions import Act, JournalEntry, Status
from api.evictions import EvictionEntry
from api.ports import Unavailable
from api.samples import Snapshot
from api.text import to_json
from cli import foretold, words
from cli.client import Client, url_option
from cli.leaving import eviction_text, threshold_text
from cli.reasons import Answer, KnobStory, Now, answer, askable
from cli.standing import memory_text, pod_text, pool_text
from cli.verdicts import verdict_text
from exporters.view import View

LABEL = 11
TRIGGERS = {
    "tick": "at its time",
    "wait": "between ticks, because online pods waited too long",
    "nri": "before it, by the container runtime, which asks the agent whenever it makes or changes a container",
    "psi": "between ticks, because a pressure trigger fired",
}
STATUSES = {
    Status.APPLIED: "written, and read back as written",
    Status.UNCHANGED: "the kernel had it already",
    Status.DRY_RUN: "not written: the agent runs dry (--act dry-run)",
    Status.REFUSED: "refused",
    Status.VANISHED: "not written: the cgroup is gone",
    Status.MISMATCH: "written, but the kernel shows something else",
}


def knob_text(story: KnobStory, now: Now, now_ns: int) -> Iterator[tuple[str, str]]:
    """Label and text of each part; the first is the heading."""
    # An agent that does not act has put back whatever an earlier one wrote, without a word in the journal.
    holds = now.act == Act.ON.value and story.later is None and not story.gone
    verb = "is" if holds else f"was, at {words.clock(story.newest.wall_time_ns / 1e6)},"
    yield "", f"{story.knob} of {words.clean(story.pod or story.cgroup)} {verb} {_value(story.knob, story.value)}"
    yield "cgroup", words.clean(story.cgroup) + (", which is gone" if story.gone else "")
    yield from _entry_text("decided", story.newest, now_ns)
    if story.in_force is not None:
        yield from _entry_text("in force", story.in_force, now_ns)
    if story.later is not None:
        yield "since then", _line(story.later)
    for i, entry in enumerate(story.earlier):
        yield "" if i else "earlier", _line(entry)


def _line(entry: JournalEntry) -> str:
    rule = words.clean(entry.outcome.decision.verdict.rule)
    when = words.clock(entry.wall_time_ns / 1e6)
    return f"#{entry.seq}, {when} {words.change(entry.outcome)} ({entry.outcome.status.value}, {rule})"


def _entry_text(label: str, entry: JournalEntry, now_ns: int) -> Iterator[tuple[str, str]]:
    outcome, verdict = entry.outcome, entry.outcome.decision.verdict
    knob = outcome.decision.knob.value
    when = f"{words.clock(entry.wall_time_ns / 1e6)}, {words.age((now_ns - entry.wall_time_ns) / 1e9)} ago"
    status = words.join([STATUSES[outcome.status], words.clean(outcome.error)], ": ")
    yield (
        label,
        f"#{entry.seq}, {when}: {_value(knob, outcome.before)} → {_value(knob, outcome.decision.value)}; {status}",
    )
    if outcome.repaired:
        yield "", "it had been so before, and somebody else or the kernel had changed it: repaired"
    if outcome.clamped_from is not None:
        yield "", f"the policy asked for {_value(knob, outcome.clamped_from)}, which is out of bounds"
    yield (
        "round",
        f"{entry.round_seq:,}, {TRIGGERS.get(entry.trigger, entry.trigger)}; policy {words.clean(entry.policy) or 'none'}",
    )
    yield from verdict_text(verdict)


def _value(knob: str, value: str | None) -> str:
    """Meaning and the kernel's own notation."""
    if value is None:
        return "not known"
    meaning = words.knob_value(knob, value)
    return meaning if meaning == value else f"{meaning} ({words.clean(value) or 'empty'})"


def now_text(now: Now) -> Iterator[tuple[str, str]]:
    """What the latest round says, and what it says it from."""
    yield "", f"Now: round {now.seq:,}, {words.age(now.age_s)} ago, --act {now.act}"
    yield (
        "verdict",
        f"{now.action or 'no advice'}: {words.clean(now.text) or 'no policy; what the settings ask besides is done'}",
    )
    if now.rule:
        limit = "" if now.threshold is None else f", threshold {now.threshold:g}"
        yield "rule", f"{words.clean(now.rule)}{limit}; policy {words.clean(now.policy)}"
    if now.shadow is not None:
        lent = words.cores(now.shadow.lent_cores)
        text = f"{words.clean(now.shadow.policy)} would lend {lent} cores: {words.clean(now.shadow.reason)}"
        yield "shadow", text
    for said in now.answers:
        yield said.topic, f"{words.clean(said.text)} (rule {words.clean(said.rule)})"
    for i, outlook in enumerate(now.forecasts):
        yield "" if i else "foretold", foretold.sentence(outlook)
    older = {each.source: each for each in now.readings}
    for i, source in enumerate(now.sources):
        fate = f"{words.age(now.age_s)} old, took {words.duration(source.duration_ns / 1000)}"
        if (reading := older.get(source.name)) is not None:
            age_s = now.age_s + (now.wall_time_ns - reading.read_at_ns) / 1e9
            fate += f"; {reading.what}: {words.age(age_s)} old"
        if not source.ok:
            fate = f"failed: {words.clean(source.error)}; {words.clean(source.remedy)}"
        sign, name = "✓" if source.ok else "✕", words.join([words.clean(source.name), words.clean(source.detail)], " ")
        yield "" if i else "sources", f"{sign} {name}: {fate}"


def text(found: Answer, now_ns: int, width: int) -> Iterator[str]:
    """The whole answer, a section per knob and pool."""
    for story in found.knobs:
        yield from section(knob_text(story, found.now, now_ns), width)
    for pod in found.pods:
        yield from section(pod_text(pod), width)
    for pool in found.pools:
        yield from section(pool_text(pool), width)
    if found.memory is not None:
        yield from section(memory_text(found.memory), width)
    for evicted in found.evictions:
        yield from section(eviction_text(evicted, now_ns), width)
    for threshold in found.thresholds:
        yield from section(threshold_text(threshold), width)
    yield from section(now_text(found.now), width)


def section(parts: Iterator[tuple[str, str]], width: int) -> Iterator[str]:
    """A heading and its labelled parts, wrapped, with an empty line after them."""
    yield next(parts)[1]
    for label, content in parts:
        first, rest = f"  {label:<{LABEL}}", " " * (LABEL + 2)
        yield textwrap.fill(
            content, max(width, 40), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
        )
    yield ""


def nothing(target: str, kinds: dict[str, list[str]]) -> Iterator[str]:
    """What could have been asked."""
    yield f"Nothing is known about '{words.clean(target)}'. You can ask about"
    for kind, names in kinds.items():
        yield f"  {kind:<9}{', '.join(words.clean(name) for name in names) or 'none'}"


@click.command()
@click.argument("target", required=False, metavar="[POD|CGROUP|KNOB|POOL|REGION|PLUGIN|memory|#EVENT]")
@url_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain(target: str | None, url: str, as_json: bool) -> None:
    """Say why a knob, pod, pool or memory is what it is: the decision, its rule, threshold and inputs, and where those come
    from. Of a pod also why it had to leave; of an eviction PLUGIN what it looks at. #EVENT is one decision by its number in
    the journal.

    Without a target: everything that the agent ever decided on. Exits with 1 where nothing is known.
    """
    client = Client(url, timeout_s=5)
    try:
        view, snapshot, entries = client.view(), client.snapshot(), client.decisions(limit=2000)
        evicted = [] if view.evictions is None else client.evictions(limit=2000)
    except Unavailable as error:
        click.echo(f"dioptase explain: {error.reason}\n  remedy: {error.remedy}", err=True)
        sys.exit(1)
    sys.exit(tell(target, (view, snapshot, entries, evicted), as_json=as_json))


Told = tuple[View, Snapshot, list[JournalEntry], list[EvictionEntry]]
"""What an agent says: its latest round, what that was judged from, its decisions and evictions, oldest first."""


def tell(target: str | None, told: Told, *, as_json: bool) -> int:
    """Print what is known, or what could have been asked; the exit status."""
    view, snapshot, entries, evicted = told
    now_ns = time.time_ns()
    found = answer(target, view, entries, snapshot, now_ns, evicted)
    if target is not None and not found.found:
        _print(nothing(target, askable(view, entries)), err=True)
        return 1
    if as_json:
        click.echo(to_json(found).decode())
    else:
        _print(text(found, now_ns, min(shutil.get_terminal_size().columns, 120)))
    return 0


def _print(lines: Iterator[str] | Sequence[str], *, err: bool = False) -> None:
    for line in lines:
        click.echo(line, err=err)
