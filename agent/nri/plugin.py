"""NRI plugin of the agent: adjusts containers when the runtime creates or updates them, in a thread of its own.
It answers within `nriPatienceS`; a container without an adjustment in time stays as the kubelet requests it. At
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

log = logging.getLogger(__name__)
PLUGIN_NAME, PLUGIN_INDEX = "dioptase", "99"
"""The runtime calls plugins in the order of their indices and rejects a second change of the same value: a late plugin sees
the changes of the others."""
CALL_TIMEOUT_S = 5.0
MIN_RECONNECT_S, MAX_RECONNECT_S = 0.2, 10.0
UPDATE_BATCH = 32
"""Containers per UpdateContainers call, because the runtime creates no other container during the call."""
RESTORE_TIMEOUT_S = 10.0
MAX_CONTAINERS = 4096
MAX_UNLISTED_S = 120.0
"""Time after which an adjusted container must be in the latest cycle: its cgroup appears when it starts."""
_EVENTS = sum(
    1 << (event - 1)
    for event in (
        wire.RUN_POD_SANDBOX, wire.CREATE_CONTAINER, wire.POST_START_CONTAINER, wire.UPDATE_CONTAINER,
        wire.STOP_CONTAINER, wire.REMOVE_CONTAINER,
    )
)  # fmt: skip


class StartFailures:
    """Remembers containers that did not start with adjustments; its methods belong to one event loop."""

    def __init__(self) -> None:
        self._starting: dict[tuple[str, str], str] = {}
        self._excluded: dict[tuple[str, str], None] = {}

    def adjusted(self, request: Any) -> None:
        """Record that this container is created with adjustments."""
        _limit_entries(MAX_CONTAINERS, self._starting)
        self._starting[_container_key(request)] = request.container.id

    def started(self, event: Any) -> None:
        """Record that this container runs."""
        self._starting.pop(_container_key(event), None)

    def reset(self) -> None:
        """Forget containers that are starting: their start event may have been lost with the connection."""
        self._starting.clear()

    def exclude_failed(self, request: Any) -> bool:
        """Exclude a container that is created again although it was adjusted and never started. Return True the first time."""
        key = _container_key(request)
        if self._starting.pop(key, request.container.id) == request.container.id:
            return False
        new = key not in self._excluded
        _limit_entries(MAX_CONTAINERS, self._excluded)
        self._excluded[key] = None
        return new

    def excludes(self, request: Any) -> bool:
        """Return whether this container must be created without adjustments."""
        return _container_key(request) in self._excluded


def _container_key(message: Any) -> tuple[str, str]:
    return (message.pod.uid, message.container.name)


def _limit_entries(limit: int, entries: dict[tuple[str, str], Any]) -> None:
    while len(entries) >= limit:
        del entries[next(iter(entries))]


class AdjustedContainer(NamedTuple):
    """A container that was created or updated with values of the agent."""

    container_id: str
    knobs: frozenset[Knob]
    at_s: float
    """Time of the latest adjustment (CLOCK_MONOTONIC, seconds)."""


class RestoreUpdate(NamedTuple):
    """Update that restores the original values of one container, and the contents of its files before."""

    cgroup: str
    cgroup_id: int
    texts: Mapping[Knob, Mapping[str, str]]
    update: Any


def restore_updates(
    files: KnobWriter, adjusted: Mapping[str, AdjustedContainer], pending: Mapping[str, Mapping[Knob, str]]
) -> list[RestoreUpdate]:
    """Return updates with the restored values of existing cgroups. Values in `pending`, by cgroup, are originals of containers
    whose cgroup did not exist when the originals were restored."""
    updates = []
    for cgroup, container in adjusted.items():
        try:
            restore = _restore_update(files, cgroup, container)
        except (OSError, Unavailable, Vanished, ValueError):
            if cgroup not in pending:
                continue
            restore = RestoreUpdate(cgroup, 0, {}, wire.ContainerUpdate(container_id=container.container_id))
        originals = pending.get(cgroup, {})
        # The original of a weight is in CPU shares, see original_values.
        values: dict[Knob, str] = {knob: value for knob, value in originals.items() if knob is not Knob.WEIGHT}
        resources = _restore_resources(files, cgroup, values, originals.get(Knob.WEIGHT, ""))
        restore.update.linux.resources.MergeFrom(resources)
        texts = {knob: text for knob, text in restore.texts.items() if knob not in originals}
        updates.append(restore._replace(texts=texts))
    return updates


def _restore_resources(files: KnobWriter, cgroup: str, values: Mapping[Knob, str], shares: str) -> Any:
    """Return OCI resources. Empty lists, which OCI cannot express, become the parent's lists; empty `shares` are left out."""
    explicit = {
        knob: format_cpu_list(files.allowed_above(cgroup, knob) or ()) if knob in LIST_KNOBS and not value else value
        for knob, value in values.items()
    }
    resources = to_oci_resources(explicit)
    if shares:
        resources.cpu.shares.value = int(shares)
    return resources


def rewrite_files(files: KnobWriter, updates: Iterable[RestoreUpdate]) -> None:
    """Write files back to their contents before the update. The runtime writes all values that it has stored, and overwrites
    files that were changed without it and lists that inherit the parent's."""
    for update in updates:
        for knob, texts in update.texts.items():
            with suppress(Unavailable, Vanished):
                if files.read_raw(update.cgroup, update.cgroup_id, knob).texts != texts:
                    files.write_raw(update.cgroup, update.cgroup_id, knob, texts)


def _restore_update(files: KnobWriter, cgroup: str, container: AdjustedContainer) -> RestoreUpdate:
    cgroup_id = cgroup_directory(files.hierarchy.primary, cgroup).stat(follow_symlinks=False).st_ino
    texts, values = dict[Knob, Mapping[str, str]](), dict[Knob, str]()
    for knob in ADJUSTABLE_KNOBS:
        with suppress(Unavailable):  # Not every kernel has every file.
            raw = files.read_raw(cgroup, cgroup_id, knob)
            texts[knob] = raw.texts
            if knob in container.knobs:
                values[knob] = files.decode(cgroup, knob, raw)
    update = wire.ContainerUpdate(container_id=container.container_id)
    shares = texts[Knob.WEIGHT].get(SHARES_FILE, "").strip() if Knob.WEIGHT in values else ""
    update.linux.resources.CopyFrom(_restore_resources(files, cgroup, values, shares))
    return RestoreUpdate(cgroup, cgroup_id, texts, update)


class NriPlugin:
    """Call `start` and `close` from the thread of the agent's event loop; requests are handled in the plugin's own thread."""

    def __init__(self, socket: Path, context: NriContext, annotations: SignedAnnotations, timeout_s: float) -> None:
        self._socket, self._context, self._annotations = socket, context, annotations
        self._adjuster, self._failures = ContainerAdjuster(context, timeout_s), StartFailures()
        self._adjusted: dict[str, AdjustedContainer] = {}
        """Adjusted containers by cgroup, reconciled with the latest cycle when one is added."""
        self._session: NriSession | None = None
        self._adjusting = True
        self.source = PodSourceHealth("nri", str(socket), "connection", time.monotonic)
        self._thread = threading.Thread(target=self._run, name="nri", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = threading.Event()
        self._bug = ""

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of container requests by answer."""
        return self._adjuster.counts.copy()

    def start(self) -> None:
        """Connect and stay connected until `close`."""
        self._thread.start()

    def stop_adjusting(self) -> None:
        """Leave containers that are created or updated from now on as requested."""
        self._adjusting = False

    def leave(self, files: KnobWriter, pending: Mapping[str, Mapping[Knob, str]]) -> None:
        """Send the runtime the restored values of all adjusted containers, and the originals in `pending`, by cgroup, of
        containers that have no cgroup yet. Takes at most RESTORE_TIMEOUT_S; failures are logged."""
        due_s = time.monotonic() + RESTORE_TIMEOUT_S
        updates = restore_updates(files, self._adjusted.copy(), pending)
        for first in range(0, len(updates), UPDATE_BATCH):
            batch = updates[first : first + UPDATE_BATCH]
            try:
                if time.monotonic() > due_s:
                    raise Unavailable(
                        f"the updates took more than {RESTORE_TIMEOUT_S:g} s", "see the log of the runtime"
                    )
                self._send_updates(wire.UpdateContainersRequest(update=[restore.update for restore in batch]))
            except (Unavailable, NriProtocolError, RuntimeError, TimeoutError) as error:
                log.warning("NRI: the runtime keeps adjusted values of up to %d containers: %s", len(batch), error)
            rewrite_files(files, batch)

    def _send_updates(self, request: Any) -> None:
        """Send the request and wait for the response; call it from a thread other than the plugin's."""
        session, loop = self._session, self._loop
        if session is None or loop is None:
            raise Unavailable("there is no connection", "see the runtime's log")
        asyncio.run_coroutine_threadsafe(session.call("UpdateContainers", request), loop).result(CALL_TIMEOUT_S + 1)

    def close(self) -> None:
        """Disconnect and end the thread. Idempotent."""
        self._closing.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # The loop may be closed already.
                self._loop.call_soon_threadsafe(self._task.cancel)
        if self._thread.is_alive():
            self._thread.join(CALL_TIMEOUT_S)
        self._adjuster.close()

    def _run(self) -> None:
        try:
            self._annotations.save_key()
            asyncio.run(self._stay_connected())
        except asyncio.CancelledError:
            pass
        except Exception as error:
            log.exception("NRI: the plugin ended")
            self.source.failed(Unavailable(f"{type(error).__name__}: {error}", "this is a bug: see the agent's log"))

    async def _stay_connected(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        wait_s = MIN_RECONNECT_S
        while not self._closing.is_set():
            start_s = time.monotonic()
            try:
                await self._serve_connection()
                failure = Unavailable(
                    f"{self._socket}: the runtime closed the connection", "see the log of the runtime"
                )
            except NriProtocolError as error:
                failure = Unavailable(f"{self._socket}: {error}", "check that this is a runtime's NRI socket")
            except (Unavailable, OSError) as error:
                failure = error if isinstance(error, Unavailable) else Unavailable(str(error), "see the runtime's log")
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                if text != self._bug:
                    log.exception("NRI: the plugin failed and connects again")
                self._bug, failure = text, Unavailable(text, "this is a bug: see the agent's log")
            self.source.failed(failure)
            steady = time.monotonic() - start_s > MAX_RECONNECT_S
            wait_s = MIN_RECONNECT_S if steady else min(wait_s * 2, MAX_RECONNECT_S)
            await asyncio.sleep(wait_s)

    async def _serve_connection(self) -> None:
        session: NriSession = await connect_nri(
            self._socket,
            {
                "Configure": self._configure,
                "Synchronize": self._synchronize,
                "Shutdown": lambda _request: wire.Empty(),
                "CreateContainer": self._create_container,
                "UpdateContainer": self._update_container,
                "StopContainer": self._stop_container,
                "StateChange": self._state_change,
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

    def _configure(self, request: Any) -> wire.ConfigureResponse:
        log.info("NRI: connected to %s %s", request.runtime_name, request.runtime_version)
        self._failures.reset()
        return wire.ConfigureResponse(events=_EVENTS)

    def _synchronize(self, request: Any) -> wire.SynchronizeResponse:
        """Restore from annotations what an earlier agent adjusted and was killed before it journalled the originals. The cycle
        takes care of all other running containers."""
        for container in request.containers:
            if text := container.annotations.get(ORIGINALS_ANNOTATION, ""):
                self._restore_annotated(container, text)
        self.source.answered()
        return wire.SynchronizeResponse(more=request.more)

    def _restore_annotated(self, container: Any, text: str) -> None:
        try:
            pairs = self._annotations.read(container.id, text)
            originals, given = ({knob: pair[which] for knob, pair in pairs.items()} for which in (0, 1))
            cgroup, now = container_cgroup(container), time.monotonic()
        except ValueError as error:
            # The creator of a pod can set this annotation, with CRI-O also on the containers.
            log.warning("NRI: annotation %s of container %s is ignored: %s", ORIGINALS_ANNOTATION, container.id, error)
            return
        self._context.pending_originals.add(cgroup, originals, now, given=given)
        self._adjusted[cgroup] = AdjustedContainer(container.id, frozenset(pairs), now)

    async def _create_container(self, request: Any) -> wire.CreateContainerResponse:
        response = wire.CreateContainerResponse()
        if self._failures.exclude_failed(request):
            log.warning(
                "NRI: container %s of pod %s/%s did not start with adjusted values and is not adjusted any more; see the "
                "runtime's log: another NRI plugin may set the same values (docs/acting.md)",
                request.container.name, request.pod.namespace, request.pod.name,
            )  # fmt: skip
        if self._failures.excludes(request):
            self._adjuster.counts["refused"] += 1
            return response
        if (adjustment := await self._adjuster.adjust_new(request)) and self._adjusting:
            self._adjuster.expect(adjustment)
            if adjustment.values:
                self._drop_removed()
                container_id, now = request.container.id, time.monotonic()
                self._failures.adjusted(request)
                self._adjusted[adjustment.cgroup] = AdjustedContainer(container_id, frozenset(adjustment.values), now)
                response.adjust.linux.resources.CopyFrom(to_oci_resources(adjustment.values))
                pairs = {knob: (original, adjustment.values[knob]) for knob, original in adjustment.owners.items()}
                response.adjust.annotations[ORIGINALS_ANNOTATION] = self._annotations.write(container_id, pairs)
                self._context.pending_originals.add(
                    adjustment.cgroup, adjustment.owners, now, outcomes=adjustment.outcomes
                )
        return response

    async def _update_container(self, request: Any) -> wire.UpdateContainerResponse:
        """Keep the agent's values in force when the owner changes them; the owner's values become the originals. If another
        plugin sets the same values, its values hold until the next cycle."""
        response = wire.UpdateContainerResponse()
        adjustment = await self._adjuster.adjust_update(request)
        if adjustment and adjustment.values and self._adjusting:
            now, before = time.monotonic(), self._adjusted.get(adjustment.cgroup)
            knobs = frozenset(adjustment.values).union(before.knobs if before is not None else ())
            container_id = before.container_id if before is not None else request.container.id
            self._adjusted[adjustment.cgroup] = AdjustedContainer(container_id, knobs, now)
            update = response.update.add(container_id=request.container.id, ignore_failure=True)
            update.linux.resources.CopyFrom(to_oci_resources(adjustment.values))
            self._context.pending_originals.add(
                adjustment.cgroup, adjustment.owners, now, existing=True, outcomes=adjustment.outcomes
            )
        return response

    def _stop_container(self, request: Any) -> wire.StopContainerResponse:
        self._forget(request.container)
        return wire.StopContainerResponse()

    def _forget(self, container: Any) -> None:
        self._adjuster.forget(container)
        self._adjusted = {
            cgroup: adjusted for cgroup, adjusted in self._adjusted.items() if adjusted.container_id != container.id
        }

    def _drop_removed(self) -> None:
        """Drop containers that are not in the latest cycle, because events are lost while the runtime is disconnected."""
        inputs = self._context.preview_inputs()
        if inputs is None or not inputs.snapshot.pods_fresh or not inputs.snapshot.cgroups:
            return
        snapshot, oldest_s = inputs.snapshot, time.monotonic() - MAX_UNLISTED_S
        running = {container.cgroup for pod in snapshot.pods for container in pod.containers} | snapshot.cgroups.keys()
        self._adjusted = {
            cgroup: adjusted
            for cgroup, adjusted in self._adjusted.items()
            if adjusted.at_s > oldest_s or cgroup in running
        }

    def _state_change(self, request: Any) -> wire.Empty:
        if request.event == wire.REMOVE_CONTAINER:
            self._forget(request.container)
        else:
            if request.event == wire.POST_START_CONTAINER:
                self._failures.started(request)
            self._context.wake()
        return wire.Empty()
