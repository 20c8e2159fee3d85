"""NRI plugin of the agent: adjusts containers when the runtime creates or updates them, in a thread of its own.
It answers within `nriPatienceS`; a container that is not understood in time stays as the kubelet requests it. At
shutdown it sends the runtime the original values. A container that failed to start with adjustments is not adjusted
again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from agent.nri.adjustments import ContainerAdjuster, NriContext, container_cgroup
from agent.nri.frames import NriProtocolError
from agent.nri.oci_resources import ADJUSTABLE_KNOBS, to_oci_resources
from agent.nri.session import NriSession, connect_nri
from agent.nri.signed_annotation import ORIGINALS_ANNOTATION, SignedAnnotations
from agent.qrm.actuator.pending_originals import SHARES_FILE
from agent.qrm.actuator.writer import KnobWriter, cgroup_directory
from agent.qrm.knobs.knob_files import LIST_KNOBS
from agent.sensors.pods.kubelet_pods import PodSourceHealth
from api.cpu import format_cpu_list
from api.interfaces import Unavailable, Vanished
from api.knobs import Knob
from api.proto import nri_pb2 as wire

MAX_CONTAINERS = 4096


class StartFailures:
    """To be asked in one event loop."""

    def __init__(self) -> None:
        self._tried: dict[tuple[str, str], str] = {}
        self._left: dict[tuple[str, str], None] = {}

    def changed(self, request: Any) -> None:
        """It is answered that this container is to be made otherwise."""
        _limit_entries(MAX_CONTAINERS, self._tried)
        self._tried[_container_key(request)] = request.container.id

    def started(self, event: Any) -> None:
        """It runs."""
        self._tried.pop(_container_key(event), None)

    def begin(self) -> None:
        """Nobody can know what has started since: of the containers that were tried nothing follows."""
        self._tried.clear()

    def failed(self, request: Any) -> bool:
        """Whether that container was tried, did not start, and is about to be made anew: told once of each."""
        if self._tried.pop(key := _container_key(request), request.container.id) == request.container.id:
            return False
        new = key not in self._left
        _limit_entries(MAX_CONTAINERS, self._left)
        self._left[key] = None
        return new

    def left(self, request: Any) -> bool:
        """Whether that container is to be made as it is wanted."""
        return _container_key(request) in self._left


def _container_key(about: Any) -> tuple[str, str]:
    return (about.pod.uid, about.container.name)


def _limit_entries(most: int, entries: dict[tuple[str, str], Any]) -> None:
    while len(entries) >= most:
        del entries[next(iter(entries))]


class AdjustedContainer(NamedTuple):
    """A container that was made, or changed, with values of the agent's."""

    container_id: str
    knobs: frozenset[Knob]


class RestoreUpdate(NamedTuple):
    """What is to be said of one container."""

    cgroup: str
    cgroup_id: int
    texts: Mapping[Knob, Mapping[str, str]]
    update: Any


def restore_updates(
    files: KnobWriter, made: Mapping[str, AdjustedContainer], told: Mapping[str, Mapping[Knob, str]]
) -> list[RestoreUpdate]:
    """Of those that are still there, by their cgroups; and of those that are not there yet, or whom nothing was put back:
    `told` has what their owners wanted."""
    found = []
    for cgroup, one in made.items():
        try:
            farewell = _restore_update(files, cgroup, one)
        except (OSError, Unavailable, Vanished, ValueError):
            if cgroup not in told:
                continue
            farewell = RestoreUpdate(cgroup, 0, {}, wire.ContainerUpdate(container_id=one.container_id))
        wanted = told.get(cgroup, {})
        # Of the weight the very shares were told.
        values: dict[Knob, str] = {knob: value for knob, value in wanted.items() if knob is not Knob.WEIGHT}
        resources = _restore_resources(files, cgroup, values, wanted.get(Knob.WEIGHT, ""))
        farewell.update.linux.resources.MergeFrom(resources)
        texts = {knob: text for knob, text in farewell.texts.items() if knob not in wanted}
        found.append(farewell._replace(texts=texts))
    return found


def _restore_resources(files: KnobWriter, cgroup: str, values: Mapping[Knob, str], shares: str) -> Any:
    """In the runtime's words, which has none for a list that is what the cgroup above has, and counts weights in `shares`, of
    which several are one weight; empty where they are not known."""
    full = {
        knob: format_cpu_list(files.allowed_above(cgroup, knob) or ()) if knob in LIST_KNOBS and not value else value
        for knob, value in values.items()
    }
    resources = to_oci_resources(full)
    if shares:
        resources.cpu.shares.value = int(shares)
    return resources


def rewrite_files(files: KnobWriter, said: Iterable[RestoreUpdate]) -> None:
    """What runtimes write is all that they believe, which is not what somebody wrote into a file; and they have no word for a
    list that is what the cgroup above has. Files say again what they said."""
    for one in said:
        for knob, texts in one.texts.items():
            with suppress(Unavailable, Vanished):
                if files.read_raw(one.cgroup, one.cgroup_id, knob).texts != texts:
                    files.write_raw(one.cgroup, one.cgroup_id, knob, texts)


def _restore_update(files: KnobWriter, cgroup: str, made: AdjustedContainer) -> RestoreUpdate:
    cgroup_id = cgroup_directory(files.hierarchy.primary, cgroup).stat(follow_symlinks=False).st_ino
    texts, values = dict[Knob, Mapping[str, str]](), dict[Knob, str]()
    for knob in ADJUSTABLE_KNOBS:
        with suppress(Unavailable):  # not every kernel has all
            raw = files.read_raw(cgroup, cgroup_id, knob)
            texts[knob] = raw.texts
            if knob in made.knobs:
                values[knob] = files.decode(cgroup, knob, raw)
    update = wire.ContainerUpdate(container_id=made.container_id)
    shares = texts[Knob.WEIGHT].get(SHARES_FILE, "").strip() if Knob.WEIGHT in values else ""
    update.linux.resources.CopyFrom(_restore_resources(files, cgroup, values, shares))
    return RestoreUpdate(cgroup, cgroup_id, texts, update)


log = logging.getLogger(__name__)
PLUGIN_NAME, PLUGIN_INDEX = "dioptase", "99"
"""Plugins are asked in the order of their indices, and what one has set another may not: who is asked last sees it."""
CALL_TIMEOUT_S = 5.0
MIN_RECONNECT_S, MAX_RECONNECT_S = 0.2, 10.0
UPDATE_BATCH = 32
"""Containers that the runtime is told of in one call, in which it makes no other."""
RESTORE_TIMEOUT_S = 10.0
_EVENTS = sum(
    1 << (event - 1)
    for event in (
        wire.RUN_POD_SANDBOX, wire.CREATE_CONTAINER, wire.POST_START_CONTAINER, wire.UPDATE_CONTAINER,
        wire.STOP_CONTAINER, wire.REMOVE_CONTAINER,
    )
)  # fmt: skip


class NriPlugin:
    """`start` and `close` from the thread that has the loop; everything else happens in a thread of the plugin's own."""

    def __init__(self, socket: Path, surroundings: NriContext, notes: SignedAnnotations, bound_s: float) -> None:
        self._socket, self._around, self._answers = socket, surroundings, ContainerAdjuster(surroundings, bound_s)
        self._notes = notes
        self._trials, self._made = StartFailures(), dict[str, AdjustedContainer]()
        self._session: NriSession | None = None
        self._quiet = False
        self.source = PodSourceHealth("nri", str(socket), "connection", time.monotonic)
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

    def stop_adjusting(self) -> None:
        """Whoever is made or changed from now on is as he is wanted."""
        self._quiet = True

    def leave(self, files: KnobWriter, told: Mapping[str, Mapping[Knob, str]]) -> None:
        """Tell the runtime, when everything is put back, what those are now that were made with values of the agent's, and what
        those are to be whom nothing was put back: `told` is what was wanted, by cgroup. Takes no more than LEAVING_S; where the
        runtime cannot be told, the log says so."""
        due, left = time.monotonic() + RESTORE_TIMEOUT_S, restore_updates(files, self._made.copy(), told)
        while left:
            some, left = left[:UPDATE_BATCH], left[UPDATE_BATCH:]
            try:
                if time.monotonic() > due:
                    raise Unavailable(f"it has taken more than {RESTORE_TIMEOUT_S:g} s", "see why the runtime is slow")
                self._tell(wire.UpdateContainersRequest(update=[one.update for one in some]))
            except (Unavailable, NriProtocolError, RuntimeError, TimeoutError) as error:
                text = "NRI: some of %d containers stay in the runtime's belief as they were made: %s"
                log.warning(text, len(some), error)
            rewrite_files(files, some)

    def _tell(self, request: Any) -> None:
        """Waits for the answer; from another thread than the plugin's."""
        session, loop = self._session, self._loop
        if session is None or loop is None:
            raise Unavailable("there is no connection", "see the runtime's log")
        asyncio.run_coroutine_threadsafe(session.call("UpdateContainers", request), loop).result(CALL_TIMEOUT_S + 1)

    def close(self) -> None:
        """Answer nobody any more, within a moment. Idempotent."""
        self._ending.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
        if self._thread.is_alive():
            self._thread.join(CALL_TIMEOUT_S)
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
        wait_s = MIN_RECONNECT_S
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                await self._once()
                failure = Unavailable(f"{self._socket}: the runtime hung up", "see its log; it is tried again")
            except NriProtocolError as error:
                failure = Unavailable(f"{self._socket}: {error}", "see whether that is a runtime's NRI socket")
            except (Unavailable, OSError) as error:
                failure = error if isinstance(error, Unavailable) else Unavailable(str(error), "it is tried again")
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                if text != self._bug:
                    log.exception("NRI: the plugin failed; it connects anew")
                self._bug, failure = text, Unavailable(text, "this is a bug: see the agent's log")
            self.source.failed(failure)
            wait_s = MIN_RECONNECT_S if time.monotonic() - began > MAX_RECONNECT_S else min(wait_s * 2, MAX_RECONNECT_S)
            await asyncio.sleep(wait_s)

    async def _once(self) -> None:
        """One connection, as long as it lasts."""
        session: NriSession = await connect_nri(
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
            CALL_TIMEOUT_S,
        )
        reading = asyncio.create_task(session.run())
        try:
            register = wire.RegisterPluginRequest(plugin_name=PLUGIN_NAME, plugin_idx=PLUGIN_INDEX)
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
            if note := container.annotations.get(ORIGINALS_ANNOTATION, ""):
                self._remember(container, note)
        self.source.answered()
        return wire.SynchronizeResponse(more=request.more)

    def _remember(self, container: Any, note: str) -> None:
        try:
            found = self._notes.read(container.id, note)
            asked, given = ({knob: pair[which] for knob, pair in found.items()} for which in (0, 1))
            cgroup = container_cgroup(container)
            self._around.foretold.add(cgroup, asked, time.monotonic(), given=given)
            self._made[cgroup] = AdjustedContainer(container.id, frozenset(found))
        except ValueError as error:
            # It may be anybody's: whoever makes a pod may have it on its containers.
            log.warning(
                "NRI: annotation %s of container %s counts for nothing: %s", ORIGINALS_ANNOTATION, container.id, error
            )

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
                self._made[found.cgroup] = AdjustedContainer(request.container.id, frozenset(found.values))
                response.adjust.linux.resources.CopyFrom(to_oci_resources(found.values))
                note = {knob: (asked, found.values[knob]) for knob, asked in found.owners.items()}
                response.adjust.annotations[ORIGINALS_ANNOTATION] = self._notes.write(request.container.id, note)
                self._around.foretold.add(found.cgroup, found.owners, time.monotonic(), outcomes=found.outcomes)
        return response

    async def _updated(self, request: Any) -> wire.UpdateContainerResponse:
        """What its owner sets anew stays below what the agent decides; it is put back at the end. Where another plugin has set
        the same, that holds until the next round."""
        response = wire.UpdateContainerResponse()
        if (found := await self._answers.changed(request)) and found.values and not self._quiet:
            before = self._made.get(found.cgroup, AdjustedContainer(request.container.id, frozenset()))
            self._made[found.cgroup] = before._replace(knobs=before.knobs | found.values.keys())
            update = response.update.add(container_id=request.container.id, ignore_failure=True)
            update.linux.resources.CopyFrom(to_oci_resources(found.values))
            self._around.foretold.add(
                found.cgroup, found.owners, time.monotonic(), existing=True, outcomes=found.outcomes
            )
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
