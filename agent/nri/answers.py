"""What to answer the runtime about a container: found beside, in time. Who is not understood is left as he is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from agent.foreseen import Basis, foreseen
from agent.hierarchy import Hierarchy
from agent.nri.asked import Listed, around, cgroup_of, pod_of
from agent.nri.resources import asked_for, bounded, owners, set_in
from agent.qrm.foretold import Foretold
from agent.qrm.placing.state import Allocation
from agent.sense.podspec import Door
from api.decisions import Decision, Outcome, Status
from api.knobs import Knob
from api.pods import Pod

log = logging.getLogger(__name__)
STALE_ROUNDS, STALE_S = 5, 15.0
"""A round that is older than so many, and than that, says nothing of now."""
EXPECTED_S = 30.0
"""So long somebody who was made is taken for one who will be listed."""


class Surroundings(NamedTuple):
    """What is looked at, all of which any thread may ask."""

    basis: Callable[[], Basis | None]
    listed: Listed
    wake: Callable[[], None]
    """Have the pods looked at now: one is coming, or one has started."""
    door: Door
    hierarchy: Hierarchy
    foretold: Foretold


class Found(NamedTuple):
    """What is to be of a container, and what its owner wanted of the same knobs."""

    pod: Pod
    cgroup: str
    values: dict[Knob, str]
    owners: dict[Knob, str]
    places: Mapping[str, Allocation]
    """CPUs of the pod's containers, by name, as they are to stay."""
    outcomes: Mapping[Knob, Outcome]
    """What will have come of each value once the container is there, and why it has it."""


class Answers:
    """To be asked in one event loop."""

    def __init__(self, surroundings: Surroundings, bound_s: float) -> None:
        self._around, self._bound_s = surroundings, bound_s
        self.counts = dict.fromkeys(("adjusted", "unchanged", "unknown", "late", "refused"), 0)
        """Containers about to be made or changed, by what was answered. Any thread may read."""
        self._expected: dict[str, tuple[float, Pod]] = {}
        self._worker = ThreadPoolExecutor(1, "nri-answer")
        self._busy = False

    def close(self) -> None:
        """Idempotent."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def expect(self, found: Found) -> None:
        """Count on that container from now on, though nobody lists it yet."""
        now = time.monotonic()
        self._expected[found.cgroup] = (now, found.pod)
        self._around.foretold.promised.make(found.pod.uid, found.places, now)

    def forget(self, container: Any) -> None:
        """It is gone."""
        try:
            self._expected.pop(cgroup_of(container), None)
        except ValueError:
            return

    async def made(self, request: Any) -> Found | None:
        """What is to be of a container that is about to be made; None where that is not known in time. Never raises."""
        return await self._in_time(request, request.container.linux.resources, frozenset(Knob))

    async def changed(self, request: Any) -> Found | None:
        """The same of one whose owner is about to set some of its knobs."""
        return await self._in_time(request, request.linux_resources, set_in(request.linux_resources))

    async def _in_time(self, request: Any, resources: Any, knobs: frozenset[Knob]) -> Found | None:
        if self._busy:
            self.counts["late"] += 1
            return None
        self._busy = True
        coming = self._still_expected()
        work = asyncio.get_running_loop().run_in_executor(self._worker, self._find, request, resources, knobs, coming)
        work.add_done_callback(self._free)
        try:
            async with asyncio.timeout(self._bound_s):
                found = await asyncio.shield(work)
        except TimeoutError:
            self.counts["late"] += 1
            return None
        except ValueError as error:
            log.warning("NRI: container %s is left as it is: %s", request.container.id[:80], error)
            found = None
        except Exception:
            log.exception("NRI: container %s is left as it is", request.container.id[:80])
            found = None
        self.counts["unknown" if found is None else "adjusted" if found.values else "unchanged"] += 1
        return found

    def _free(self, work: asyncio.Future[Found | None]) -> None:
        self._busy = False
        if not work.cancelled():
            work.exception()  # whoever came too late to hear of it has said so

    def _still_expected(self) -> list[Pod]:
        basis, now = self._around.basis(), time.monotonic()
        there = basis.snapshot.cgroups if basis is not None else {}
        listed = {one.cgroup for pod in basis.snapshot.pods for one in pod.containers} if basis is not None else set()
        self._expected = {
            cgroup: each
            for cgroup, each in self._expected.items()
            if now - each[0] < EXPECTED_S and not (cgroup in there and cgroup in listed)
        }
        return [pod for _, pod in self._expected.values()]

    def _find(self, request: Any, resources: Any, knobs: frozenset[Knob], coming: list[Pod]) -> Found | None:
        """In a thread beside. Raises ValueError for what cannot be understood."""
        basis = self._around.basis()
        if basis is None:
            return None
        age_s = (time.monotonic_ns() - basis.now_ns) / 1e9
        if age_s > max(STALE_ROUNDS * basis.config.interval_s, STALE_S):
            return None
        cgroup = cgroup_of(request.container)
        pod = pod_of(request, cgroup, self._around.listed, self._around.door)
        known = msgspec.structs.replace(basis.known, cpus=self._around.foretold.promised.kept(basis.known.cpus))
        decisions, cpus = foreseen(msgspec.structs.replace(basis, known=known), [*coming, pod], cgroup)
        wanted = {knob: decision.value for knob, decision in decisions.items()}
        bounds = around(cgroup, self._around.hierarchy)
        asked = asked_for(resources, bounds)
        values = bounded(wanted, asked, resources, bounds)
        values = {knob: value for knob, value in values.items() if knob in knobs}
        outcomes = {knob: _outcome(knob, value, asked[knob], decisions) for knob, value in values.items()}
        return Found(pod, cgroup, values, owners(values, asked, resources), cpus.pod(pod.uid), outcomes)


def _outcome(knob: Knob, given: str, asked: str, decisions: Mapping[Knob, Decision]) -> Outcome:
    """From what the owner asked for to what the container is given, because of what was decided."""
    # The least weight stands in for cpu.idle, whatever weight was decided beside it.
    idle = knob is Knob.WEIGHT and Knob.IDLE in decisions and decisions[Knob.IDLE].value == "1"
    why = decisions[Knob.IDLE if idle else knob]
    return Outcome(
        decision=msgspec.structs.replace(why, knob=knob, value=given),
        status=Status.APPLIED,
        before=asked,
        after=given,
        clamped_from=None if idle or why.value == given else why.value,
    )
