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

import msgspec

from agent.nri.answers import Answers, Surroundings
from agent.nri.asked import cgroup_of
from agent.nri.frames import Garbage
from agent.nri.resources import resources_of
from agent.nri.session import Session, connect
from agent.sense.kubepods import Source
from api.knobs import Knob
from api.ports import Unavailable
from api.proto import nri_pb2 as wire

log = logging.getLogger(__name__)
NAME, INDEX = "dioptase", "50"
"""Plugins are asked in the order of their indices, and what one has set another may not."""
AS_ASKED = "dioptase.io/as-asked"
"""Annotation of a container: of each knob that was changed what its owner wanted and what it was given, so that an agent after
this one can put it back."""
CALL_S = 5.0
FIRST_WAIT_S, LAST_WAIT_S = 0.2, 10.0
LARGEST_NOTE = 4096
_EVENTS = sum(
    1 << (event - 1)
    for event in (
        wire.RUN_POD_SANDBOX, wire.CREATE_CONTAINER, wire.POST_START_CONTAINER, wire.UPDATE_CONTAINER,
        wire.STOP_CONTAINER, wire.REMOVE_CONTAINER,
    )
)  # fmt: skip
_NOTE = msgspec.json.Decoder(dict[Knob, tuple[str, str]])


class Plugin:
    """`start` and `close` from the thread that has the loop; everything else happens in a thread of the plugin's own."""

    def __init__(self, socket: Path, surroundings: Surroundings, bound_s: float) -> None:
        self._socket, self._around, self._answers = socket, surroundings, Answers(surroundings, bound_s)
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
            await reading
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            await session.close()

    def _configured(self, request: Any) -> wire.ConfigureResponse:
        log.info("NRI: %s %s asks this agent", request.runtime_name, request.runtime_version)
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
            found = _NOTE.decode(note[:LARGEST_NOTE])
            asked, given = ({knob: pair[which] for knob, pair in found.items()} for which in (0, 1))
            self._around.foretold.tell(cgroup_of(container), asked, time.monotonic(), given=given)
        except (msgspec.MsgspecError, ValueError):
            log.warning("NRI: annotation %s of container %s cannot be read", AS_ASKED, container.id)

    async def _created(self, request: Any) -> wire.CreateContainerResponse:
        response = wire.CreateContainerResponse()
        if found := await self._answers.made(request):
            self._answers.expect(found)
            if found.values:
                response.adjust.linux.resources.CopyFrom(resources_of(found.values))
                note = {knob: (asked, found.values[knob]) for knob, asked in found.owners.items()}
                response.adjust.annotations[AS_ASKED] = msgspec.json.encode(note).decode()
                self._around.foretold.tell(found.cgroup, found.owners, time.monotonic())
        return response

    async def _updated(self, request: Any) -> wire.UpdateContainerResponse:
        """What its owner sets anew stays below what the agent decides; it is put back at the end."""
        response = wire.UpdateContainerResponse()
        if (found := await self._answers.changed(request)) and found.values:
            update = response.update.add(container_id=request.container.id)
            update.linux.resources.CopyFrom(resources_of(found.values))
            self._around.foretold.tell(found.cgroup, found.owners, time.monotonic(), anew=True)
        return response

    def _stopped(self, request: Any) -> wire.StopContainerResponse:
        self._answers.forget(request.container)
        return wire.StopContainerResponse()

    def _changed(self, request: Any) -> wire.Empty:
        if request.event == wire.REMOVE_CONTAINER:
            self._answers.forget(request.container)
        else:
            self._around.wake()
        return wire.Empty()
