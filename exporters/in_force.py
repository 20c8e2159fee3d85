"""Limits as the agent has just left them: the files of limits are read seldom, and an outcome knows better. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.decisions import Outcome, Round, Status
from api.facts import UNLIMITED, Limits
from api.knobs import Knob
from api.samples import Snapshot

_TRUE = (Status.APPLIED, Status.UNCHANGED)


def with_limits_in_force(finished: Round) -> Snapshot:
    """The round's snapshot, with every limit that its outcomes have read back."""
    snapshot = finished.snapshot
    changed: dict[str, Limits] = {}
    for outcome in finished.done:
        path, sample = outcome.decision.cgroup, snapshot.cgroups.get(outcome.decision.cgroup)
        if sample is None or outcome.status not in _TRUE or outcome.after is None:
            continue
        before = changed.get(path, sample.limits)
        after = msgspec.structs.replace(before, **_read(outcome))
        if after != before:
            changed[path] = after
    if not changed:
        return snapshot
    cgroups = dict(snapshot.cgroups)
    for path, limits in changed.items():
        cgroups[path] = msgspec.structs.replace(cgroups[path], limits=limits)
    return msgspec.structs.replace(snapshot, cgroups=cgroups)


def _read(outcome: Outcome) -> Mapping[str, int | str | bool]:
    knob, text = outcome.decision.knob, outcome.after or ""
    if knob is Knob.QUOTA:
        quota, _, period = text.partition(" ")
        return {"quota_us": -1 if quota == "max" else int(quota), "period_us": int(period)}
    if knob is Knob.IDLE:
        return {"idle": text == "1"}
    if knob is Knob.CPUSET:
        return {"cpus": text}
    if knob is Knob.MEMORY_MAX:
        return {"memory_max_bytes": UNLIMITED if text == "max" else int(text)}
    return {}
