"""The counterpart of agent.nri.lifecycle on nodes whose pods come from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from api.decision import Outcome
from api.interfaces import HealthReporter

if TYPE_CHECKING:
    from agent.advisor.preview import PreviewInputs
    from agent.qrm.actuator.originals import OriginalsJournal
    from agent.qrm.actuator.pending_originals import PendingOriginals
    from agent.qrm.actuator.writer import KnobWriter


class NullRuntime:
    """Replaces NriLifecycle if the pods come from a file: it does nothing."""

    pending_originals: PendingOriginals | None = None
    reporters: tuple[HealthReporter, ...] = ()
    answers: Mapping[str, int] = {}

    def start(self, preview_inputs: Callable[[], PreviewInputs | None]) -> None: ...

    def end(self, files: KnobWriter, originals: OriginalsJournal | None) -> tuple[Outcome, ...]:  # noqa: ARG002 - NriLifecycle's
        return ()

    def leave(self, files: KnobWriter) -> None: ...
