"""Containers that were to be made with what the agent answered, and did not start: nobody is kept from running by an answer.

Whatever the reason (another plugin of the runtime sets the same thing, which the runtime takes for an error; values that the
kernel does not take), the one who wants the container tries again: then it is made as it is wanted, and from then on."""

from __future__ import annotations

from typing import Any

MOST = 4096


class Trials:
    """To be asked in one event loop."""

    def __init__(self) -> None:
        self._tried: dict[tuple[str, str], str] = {}
        self._left: dict[tuple[str, str], None] = {}

    def changed(self, request: Any) -> None:
        """It is answered that this container is to be made otherwise."""
        _keep_to(MOST, self._tried)
        self._tried[_key(request)] = request.container.id

    def started(self, event: Any) -> None:
        """It runs."""
        self._tried.pop(_key(event), None)

    def begin(self) -> None:
        """Nobody can know what has started since: of the containers that were tried nothing follows."""
        self._tried.clear()

    def failed(self, request: Any) -> bool:
        """Whether that container was tried, did not start, and is about to be made anew: told once of each."""
        if self._tried.pop(key := _key(request), request.container.id) == request.container.id:
            return False
        new = key not in self._left
        _keep_to(MOST, self._left)
        self._left[key] = None
        return new

    def left(self, request: Any) -> bool:
        """Whether that container is to be made as it is wanted."""
        return _key(request) in self._left


def _key(about: Any) -> tuple[str, str]:
    return (about.pod.uid, about.container.name)


def _keep_to(most: int, entries: dict[tuple[str, str], Any]) -> None:
    while len(entries) >= most:
        del entries[next(iter(entries))]
