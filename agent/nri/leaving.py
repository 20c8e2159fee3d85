"""What the runtime is told at the end: that the containers which were made with values of the agent's are as their files say.

It would write those values again with everything else that it believes, whenever somebody changes such a container through it
(the kubelet that resizes a pod in place, `crictl update`), long after the agent has put the files back and is gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from agent.nri.resources import KNOWN, resources_of
from agent.qrm.foretold import SHARES
from agent.qrm.knobs import KnobFiles
from agent.qrm.paths import below
from agent.qrm.restore import LISTS
from api.cpus import format_cpu_list
from api.knobs import Knob
from api.ports import Unavailable, Vanished
from api.proto import nri_pb2 as wire


class Made(NamedTuple):
    """A container that was made, or changed, with values of the agent's."""

    container_id: str
    knobs: frozenset[Knob]


class Farewell(NamedTuple):
    """What is to be said of one container."""

    cgroup: str
    cgroup_id: int
    texts: Mapping[Knob, Mapping[str, str]]
    update: Any


def farewells(files: KnobFiles, made: Mapping[str, Made], told: Mapping[str, Mapping[Knob, str]]) -> list[Farewell]:
    """Of those that are still there, by their cgroups; and of those that are not there yet, or whom nothing was put back:
    `told` has what their owners wanted."""
    found = []
    for cgroup, one in made.items():
        try:
            farewell = _farewell(files, cgroup, one)
        except (OSError, Unavailable, Vanished, ValueError):
            if cgroup not in told:
                continue
            farewell = Farewell(cgroup, 0, {}, wire.ContainerUpdate(container_id=one.container_id))
        wanted = told.get(cgroup, {})
        # Of the weight the very shares were told.
        values: dict[Knob, str] = {knob: value for knob, value in wanted.items() if knob is not Knob.WEIGHT}
        resources = _resources(files, cgroup, values, wanted.get(Knob.WEIGHT, ""))
        farewell.update.linux.resources.MergeFrom(resources)
        texts = {knob: text for knob, text in farewell.texts.items() if knob not in wanted}
        found.append(farewell._replace(texts=texts))
    return found


def _resources(files: KnobFiles, cgroup: str, values: Mapping[Knob, str], shares: str) -> Any:
    """In the runtime's words, which has none for a list that is what the cgroup above has, and counts weights in `shares`, of
    which several are one weight; empty where they are not known."""
    full = {
        knob: format_cpu_list(files.ceiling(cgroup, knob) or ()) if knob in LISTS and not value else value
        for knob, value in values.items()
    }
    resources = resources_of(full)
    if shares:
        resources.cpu.shares.value = int(shares)
    return resources


def as_before(files: KnobFiles, said: Iterable[Farewell]) -> None:
    """What runtimes write is all that they believe, which is not what somebody wrote into a file; and they have no word for a
    list that is what the cgroup above has. Files say again what they said."""
    for one in said:
        for knob, texts in one.texts.items():
            with suppress(Unavailable, Vanished):
                if files.read_raw(one.cgroup, one.cgroup_id, knob).texts != texts:
                    files.write_raw(one.cgroup, one.cgroup_id, knob, texts)


def _farewell(files: KnobFiles, cgroup: str, made: Made) -> Farewell:
    cgroup_id = below(files.hierarchy.primary, cgroup).stat(follow_symlinks=False).st_ino
    texts, values = dict[Knob, Mapping[str, str]](), dict[Knob, str]()
    for knob in KNOWN:
        with suppress(Unavailable):  # not every kernel has all
            raw = files.read_raw(cgroup, cgroup_id, knob)
            texts[knob] = raw.texts
            if knob in made.knobs:
                values[knob] = files.decode(cgroup, knob, raw)
    update = wire.ContainerUpdate(container_id=made.container_id)
    shares = texts[Knob.WEIGHT].get(SHARES, "").strip() if Knob.WEIGHT in values else ""
    update.linux.resources.CopyFrom(_resources(files, cgroup, values, shares))
    return Farewell(cgroup, cgroup_id, texts, update)
