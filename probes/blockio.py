"""Block I/O per cgroup and device: how long requests took from their issue to the driver until completion, and their bytes.

What the numbers mean: requests, as the device gets them, not calls: one read(2) of a megabyte is several, and neighbouring
writes may become one. Time in the I/O scheduler before the issue is not included: it is the kernel's, and PSI shows it. Bytes
are those that arrived without error, of reads and writes alone; discards and flushes are not requests of data. The device
is the whole disk, as in io.stat. Where the io controller is in the cpu controller's hierarchy (version 2), a request
belongs to the cgroup that the kernel charges, so writeback of dirty pages belongs to whoever dirtied them; with io not
enabled for a cgroup, to its nearest ancestor that has it. Otherwise (version 1) it belongs to the cgroup of the task that
submitted it: reads, direct and synchronous writes of a program are its own, and what kernel threads write back later is
the root's, as it is in version 1's own accounting.

What it cannot see: file systems without a block device (NFS, tmpfs, overlay on them), requests of drivers that bypass the
block layer's requests (such as device mapper's own, whose lower device is seen), zone appends, and requests that were under
way when the probe was opened. Not more than 2,048 pairs of cgroup and device are counted, and not more than 8,192
requests at one time; what found no room is a problem that is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from api.facts import BlockIo, Durations
from api.histograms import SLOTS
from api.ports import Seen, Unavailable
from probes import fields
from probes.btf import VMLINUX
from probes.groups import Absentees
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, opened
from probes.losses import Losses
from probes.maps import Map, possible_cpus, total

FORMS = ("tp_btf", "raw_tp")
"""In order of preference."""
PAIRS, REQUESTS = 2048, 8192
"""Elements of the maps: 1.1 and 0.7 MiB."""
_FULL, _UNKNOWN = 0, 3
"""Reasons of common.bpf.h: no room for a pair, no room for a request."""
_COUNTERS = 2 + SLOTS
"""Of one direction: sum, bytes and the histogram."""
_FIELDS = {
    **fields.GROUP,
    "CGROUP_ROOT": [("cgroup", "root", 8)],
    "RQ_QUEUE": [("request", "q", 8)],
    "RQ_FLAGS": [("request", "cmd_flags", 4)],
    "RQ_BYTES": [("request", "__data_len", 4)],
    "RQ_BIO": [("request", "bio", 8)],
    "DISK_MAJOR": [("gendisk", "major", 4)],
    "DISK_MINOR": [("gendisk", "first_minor", 4)],
}
_OPTIONAL = {
    # The disk moved from the request to the queue with d152c682f03c and f3fa33acca9f (Linux 5.15 and 5.17).
    "RQ_DISK": [("request", "rq_disk", 8)],
    "QUEUE_DISK": [("request_queue", "disk", 8)],
    # CONFIG_BLK_CGROUP
    "BIO_BLKG": [("bio", "bi_blkg", 8)],
    "BLKG_BLKCG": [("blkcg_gq", "blkcg", 8)],
    "BLKCG_CGROUP": [("blkcg", "css.cgroup", 8)],
}
_REQUEST = ("struct request *",)
_KNOWN = (((), "u8"), ((), "s32"), (("struct request_queue *",), "s32"))
"""What kernels pass: before the request on its way to the driver, its queue until a54895fa057c (Linux 5.11); behind it on the
way back, how it went, an errno until Linux 5.16."""


def _form(name: str, before: Sequence[str], status: str, *, typed: bool) -> Form:
    there, back = (*before, *_REQUEST), (*_REQUEST, status, "u32")
    return Form(
        name=name,
        typed=typed,
        fields=_FIELDS,
        optional=_OPTIONAL,
        programs=[
            Program("on_insert", "block_rq_insert", "dtse_bio_insert", arguments=there),
            Program("on_issue", "block_rq_issue", "dtse_bio_issue", arguments=there),
            Program("on_complete", "block_rq_complete", "dtse_bio_done", arguments=back),
        ],
        constants={"FIRST": len(before), **({"TYPED": 1} if typed else {})},
    )


_FORMS = {name: [_form(name, *known, typed=name == "tp_btf") for known in _KNOWN] for name in FORMS}


class BlockIoProbe:
    """The running probe: a Probe (`api.ports`)."""

    name = "blockio"

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.form = loaded.form
        self._pairs: Map | None = Map(*loaded.maps["blockio"], possible_cpus())
        self._lost = Map(*loaded.maps["lost"], possible_cpus())
        self._decoded: dict[tuple[int, int], tuple[list[int], BlockIo]] = {}
        self._absentees = Absentees()
        self._without_pair, self._without_room = Losses(), Losses()

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:
        """Requests by cgroup id and device since the probe was opened. Raises Unavailable once closed."""
        if self._pairs is None:
            raise Unavailable("the probe blockio is closed", "open it again")
        try:
            keys, values = self._pairs.items()
            if complete:
                self._forget(self._pairs, live, keys.tolist())
            lost = [int(row[0]) for row in total(self._lost.rows([0, 1, 2, 3]))]
            self._without_pair.update(lost[_FULL])
            self._without_room.update(lost[_UNKNOWN])
        except OSError as error:
            raise Unavailable(
                f"the maps of blockio cannot be read: {error.strerror}", "start the agent again"
            ) from error
        rows = np.ascontiguousarray(values).view(np.uint64).reshape(len(values), 2 * _COUNTERS).tolist()
        return Seen(self._by_cgroup(keys.tolist(), rows))

    def problem(self) -> Unavailable | None:
        """Requests that found no room lately, as of the latest read."""
        return self._without_pair.problem(
            f"block requests were not counted: more than {PAIRS} pairs of cgroup and device",
            "remove cgroups that nobody uses",
        ) or self._without_room.problem(
            f"block requests were not counted: more than {REQUESTS} were under way",
            "this is more than devices take; report it with the agent's log",
        )

    @property
    def lost_events(self) -> int | None:
        """Requests that found no room since the start, as of the latest read."""
        return self._without_pair.total + self._without_room.total

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._pairs = None
        self._loaded.close()

    def _by_cgroup(self, keys: Sequence[tuple[int, int]], rows: Sequence[list[int]]) -> dict[int, dict[str, object]]:
        """Most disks are idle most of the time: a row that has not changed is not decoded again."""
        decoded: dict[tuple[int, int], tuple[list[int], BlockIo]] = {}
        devices: dict[int, dict[str, BlockIo]] = {}
        for key, row in zip(keys, rows, strict=True):
            known = self._decoded.get(key)
            decoded[key] = known if known is not None and known[0] == row else (row, decode(row))
            number, device = key
            devices.setdefault(number, {})[f"{device >> 32}:{device & 0xFFFFFFFF}"] = decoded[key][1]
        self._decoded = decoded
        return {number: {"block_io": by_device} for number, by_device in devices.items()}

    def _forget(self, pairs: Map, live: Mapping[int, str], keys: Sequence[tuple[int, int]]) -> None:
        """Remove what belongs to cgroups that are gone."""
        gone = self._absentees.gone((number for number, _ in keys), live)
        for key in keys:
            if key[0] in gone:
                pairs.delete(key)


def decode(row: Sequence[int]) -> BlockIo:
    """Pure: `struct counters`, the direction of reads first."""
    reads, writes = row[:_COUNTERS], row[_COUNTERS:]
    return BlockIo(reads=_durations(reads), writes=_durations(writes), read_bytes=reads[1], write_bytes=writes[1])


def _durations(direction: Sequence[int]) -> Durations:
    slots = tuple(direction[2:])
    return Durations(sum_ns=direction[0], count=sum(slots), slots=slots)


def job(forms: Sequence[str], btf: Path = VMLINUX) -> Job:
    """What the child is asked to do."""
    here = Path(__file__).parent
    return Job(
        sources=[here / "common.bpf.h", here / "blockio.bpf.c"],
        forms=[form for name in forms for form in _FORMS[name]],
        maps=["blockio", "lost"],
        constants={"SLOTS": SLOTS, "SEATS": 1, "PLACES": 1, "PAIRS": PAIRS, "REQUESTS": REQUESTS},
        btf=btf,
        remedy="use Linux 5.5 or later, with CONFIG_BLOCK",
    )


def open_blockio(
    *, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> BlockIoProbe:
    """Start the probe in the first form that the kernel takes. Raises Unavailable with reason and remedy if it takes none."""
    return opened(job(forms, btf), BlockIoProbe, child_python=child_python)
