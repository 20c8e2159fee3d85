"""What probes with a table per cgroup have in common: reading it, saying what found no place in it, closing."""

from __future__ import annotations

from collections.abc import Mapping

from api.ports import Unavailable
from probes import bpf
from probes.groups import GroupTable, Lost, Overflow
from probes.loader import Loaded


class Tabled:
    """The table of one loaded probe. `name` is its map, `events` what it counts, in a person's words."""

    def __init__(self, loaded: Loaded, name: str, events: str) -> None:
        self._loaded, self._name, self._events = loaded, name, events
        self._table: GroupTable | None = GroupTable(loaded, name)
        self._places = self._table.places
        self._overflow = Overflow()

    def rows(self, live: Mapping[int, str], *, complete: bool) -> tuple[dict[int, list[int]], bool]:
        """Counters by cgroup id, and whether live cgroups that are not among them have counted nothing.

        They have, unless any cgroup found no place since the listing before this one: it may be theirs that was lost.
        Raises Unavailable once closed.
        """
        table = self._open_table()
        try:
            ids, rows = table.read(live, complete=complete)
            unsure = self._overflow.grew(table.lost().full, live)
        except OSError as error:
            raise Unavailable(
                f"the maps of {self._name} cannot be read: {error.strerror}", "start the agent again"
            ) from error
        return dict(zip(ids, rows.tolist(), strict=True)), not unsure

    def problem(self) -> Unavailable | None:
        """Whether cgroups found no place in the table since the start, as of the latest read."""
        if not self._overflow.total:
            return None
        return Unavailable(
            f"{self._overflow.total} {self._events} of cgroups that found no place in the table of {self._places}"
            " were not counted",
            "remove cgroups that nobody uses; where cgroup-limit is a problem too, raise maxCgroups: dead cgroups keep"
            " their places while the list of cgroups is not complete",
        )

    def lost(self) -> Lost:
        """Events that were not counted, by reason."""
        return self._open_table().lost()

    def stats(self) -> dict[str, bpf.ProgramInfo]:
        """Runs and run time of each program; they grow only while kernel statistics are on."""
        return self._loaded.stats()

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._table = None
        self._loaded.close()

    def _open_table(self) -> GroupTable:
        if self._table is None:
            raise Unavailable(f"the probe {self._name} is closed", "open it again")
        return self._table
