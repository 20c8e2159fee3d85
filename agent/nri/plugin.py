"""The agent as a plugin of the container runtime (NRI): whoever is about to be made gets at once what the next round would give
him, so that not even his first instruction runs without limits.

It runs in a thread of its own, so that a long round keeps no container waiting, and answers within `bound_s` whatever
happens: who is not understood in time, or while the agent knows too little, is made as the kubelet wants him, and the next
round has its turn.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent.nri.answers import Answers, Surroundings
from agent.nri.asked import cgroup_of
from agent.nri.frames import Garbage
from agent.nri.leaving import Made, as_before, farewells
from agent.nri.notes import AS_ASKED, Notes
from agent.nri.resources import resources_of
from agent.nri.session import Session, connect
from agent.nri.trials import Trials
from agent.qrm.knobs import KnobFiles
from agent.sense.kubepods import Source
from api.knobs import Knob
from api.ports import Unavailable
from api.proto import nri_pb2 as wire

log = logging.getLogger(__name__)
NAME, INDEX = "dioptase", "99"
"""Plugins are asked in the order of their indices, and what one has set another may not: who is asked last sees it."""
CALL_S = 5.0
FIRST_WAIT_S, LAST_WAIT_S = 0.2, 10.0
TOGETHER = 32
"""Containers that the runtime is told of in one call, in which it makes no other."""
LEAVING_S = 10.0
_EVENTS = sum(
    1 << (event - 1)
    for event in (
        wire.RUN_POD_SANDBOX, wire.CREATE_CONTAINER, wire.POST_START_CONTAINER, wire.UPDATE_CONTAINER,
        wire.STOP_CONTAINER, wire.REMOVE_CONTAINER,
    )
)  # fmt: skip


class Plugin:
    """`start` and `close` from the thread that has the loop; everything else happens in a thread of the plugin's own."""

    def __init__(self, socket: Path, surroundings: Surroundings, notes: Notes, bound_s: float) -> None:
        self._socket, self._around, self._answers = socket, surroundings, Answers(surroundings, bound_s)
        self._notes = notes
        self._trials, self._made = Trials(), dict[str, Made]()
        self._session: Session | None = None
        self._quiet = False
        self.source = Source("nri", str(socket), "connection", time.monotonic)
        self._thread = threading.Thread(target=self._run, name="nri", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending = threading.Event()
        self._bug = ""

    @property
    def counts(self) -> Mapping[str, int]:
        """Containers about to be made or changed so far, by what was answered."""
        return self._answers.counts.copy()

    def start(self) -> None:
        """Connect, and stay connected until `close`."""
        self._thread.start()

    def silence(self) -> None:
        """Whoever is made or changed from now on is as he is wanted."""
        self._quiet = True

    def leave(self, files: KnobFiles, told: Mapping[str, Mapping[Knob, str]]) -> None:
        """Tell the runtime, when everything is put back, what those are now that were made with values of the agent's, and what
        those are to be whom nothing was put back: `told` is what was wanted, by cgroup. Takes no more than LEAVING_S; where the
        runtime cannot be told, the log says so."""
        due, left = time.monotonic() + LEAVING_S, farewells(files, self._made.copy(), told)
        while left:
            some, left = left[:TOGETHER], left[TOGETHER:]
            try:
                if time.monotonic() > due:
                    raise Unavailable(f"it has taken more than {LEAVING_S:g} s", "see why the runtime is slow")
                self._tell(wire.UpdateContainersRequest(update=[one.update for one in some]))
            except (Unavailable, Garbage, RuntimeError, TimeoutError) as error:
                text = "NRI: some of %d containers stay in the runtime's belief as they were made: %s"
                log.warning(text, len(some), error)
            as_before(files, some)

    def _tell(self, request: Any) -> None:
        """Waits for the answer; from another thread than the plugin's."""
        session, loop = self._session, self._loop
        if session is None or loop is None:
            raise Unavailable("there is no connection", "see the runtime's log")
        asyncio.run_coroutine_threadsafe(session.call("UpdateContainers", request), loop).result(CALL_S + 1)

    def close(self) -> None:
        """Answer nobody any more, within a moment. Idempotent."""
        self._ending.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
        if self._thread.is_alive():
            self._thread.join(CALL_S)
        self._answers.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._stay())
        except asyncio.CancelledError:
            pass
        except Exception as error:
            log.exception("NRI: the plugin ended")
            self.source.failed(Unavailable(f"{type(error).__name__}: {error}", "this is a bug: see the agent's log"))

    async def _stay(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        wait_s = FIRST_WAIT_S
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                await self._once()
                failure = Unavailable(f"{self._socket}: the runtime hung up", "see its log; it is tried again")
            except Garbage as error:
                failure = Unavailable(f"{self._socket}: {error}", "see whether that is a runtime's NRI socket")
            except (Unavailable, OSError) as error:
                failure = error if isinstance(error, Unavailable) else Unavailable(str(error), "it is tried again")
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                if text != self._bug:
                    log.exception("NRI: the plugin failed; it connects anew")
                self._bug, failure = text, Unavailable(text, "this is a bug: see the agent's log")
            self.source.failed(failure)
            wait_s = FIRST_WAIT_S if time.monotonic() - began > LAST_WAIT_S else min(wait_s * 2, LAST_WAIT_S)
            await asyncio.sleep(wait_s)

    async def _once(self) -> None:
        """One connection, as long as it lasts."""
        session: Session = await connect(
            self._socket,
            {
                "Configure": self._configured,
                "Synchronize": self._synchronized,
                "Shutdown": lambda _request: wire.Empty(),
                "CreateContainer": self._created,
                "UpdateContainer": self._updated,
                "StopContainer": self._stopped,
                "StateChange": self._changed,
            },
            CALL_S,
        )
        reading = asyncio.create_task(session.run())
        try:
            register = wire.RegisterPluginRequest(plugin_name=NAME, plugin_idx=INDEX)
            await session.call("RegisterPlugin", register)
            self._session = session
            await reading
        finally:
            self._session = None
            reading.cancel()
            await asyncio.wait([reading])
            await session.close()

    def _configured(self, request: Any) -> wire.ConfigureResponse:
        log.info("NRI: %s %s asks this agent", request.runtime_name, request.runtime_version)
        self._trials.begin()
        return wire.ConfigureResponse(events=_EVENTS)

    def _synchronized(self, request: Any) -> wire.SynchronizeResponse:
        """Who is there already has the rounds. What an agent before this one changed, and was killed before it had noted that
        in its journal, is written on the containers."""
        for container in request.containers:
            if note := container.annotations.get(AS_ASKED, ""):
                self._remember(container, note)
        self.source.answered()
        return wire.SynchronizeResponse(more=request.more)

    def _remember(self, container: Any, note: str) -> None:
        try:
            found = self._notes.read(container.id, note)
            asked, given = ({knob: pair[which] for knob, pair in found.items()} for which in (0, 1))
            cgroup = cgroup_of(container)
            self._around.foretold.tell(cgroup, asked, time.monotonic(), given=given)
            self._made[cgroup] = Made(container.id, frozenset(found))
        except ValueError as error:
            # It may be anybody's: whoever makes a pod may have it on its containers.
            log.warning("NRI: annotation %s of container %s counts for nothing: %s", AS_ASKED, container.id, error)

    async def _created(self, request: Any) -> wire.CreateContainerResponse:
        response = wire.CreateContainerResponse()
        if self._trials.failed(request):
            log.warning(
                "NRI: container %s of pod %s/%s did not start with what it was given, and is made as it is from now on: see "
                "the runtime's log; another of its plugins may set the same (docs/acting.md)",
                request.container.name, request.pod.namespace, request.pod.name,
            )  # fmt: skip
        if self._trials.left(request):
            self._answers.counts["refused"] += 1
            return response
        if (found := await self._answers.made(request)) and not self._quiet:
            self._answers.expect(found)
            if found.values:
                self._trials.changed(request)
                self._made[found.cgroup] = Made(request.container.id, frozenset(found.values))
                response.adjust.linux.resources.CopyFrom(resources_of(found.values))
                note = {knob: (asked, found.values[knob]) for knob, asked in found.owners.items()}
                response.adjust.annotations[AS_ASKED] = self._notes.write(request.container.id, note)
                self._around.foretold.tell(found.cgroup, found.owners, time.monotonic(), done=found.outcomes)
        return response

    async def _updated(self, request: Any) -> wire.UpdateContainerResponse:
        """What its owner sets anew stays below what the agent decides; it is put back at the end. Where another plugin has set
        the same, that holds until the next round."""
        response = wire.UpdateContainerResponse()
        if (found := await self._answers.changed(request)) and found.values and not self._quiet:
            before = self._made.get(found.cgroup, Made(request.container.id, frozenset()))
            self._made[found.cgroup] = before._replace(knobs=before.knobs | found.values.keys())
            update = response.update.add(container_id=request.container.id, ignore_failure=True)
            update.linux.resources.CopyFrom(resources_of(found.values))
            self._around.foretold.tell(found.cgroup, found.owners, time.monotonic(), anew=True, done=found.outcomes)
        return response

    def _stopped(self, request: Any) -> wire.StopContainerResponse:
        self._forget(request.container)
        return wire.StopContainerResponse()

    def _forget(self, container: Any) -> None:
        self._answers.forget(container)
        self._made = {cgroup: made for cgroup, made in self._made.items() if made.container_id != container.id}

    def _changed(self, request: Any) -> wire.Empty:
        if request.event == wire.REMOVE_CONTAINER:
            self._forget(request.container)
        else:
            if request.event == wire.POST_START_CONTAINER:
                self._trials.started(request)
            self._around.wake()
        return wire.Empty()
