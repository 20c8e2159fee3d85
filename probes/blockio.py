"""Measures block I/O requests per cgroup and device: time from issue to completion, and bytes.
Time in the I/O scheduler before the issue is not included. On version 2 a request belongs to the cgroup that the
kernel charges, on version 1 to the cgroup of the submitting task. File systems without a block device are not seen.
At most 2,048 pairs of cgroup and device and 8,192 requests in flight are counted; what does not fit is a reported
problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from api.histogram import SLOT_COUNT
from api.interfaces import ProbeReading, Unavailable
from api.snapshot import BlockIo
from probes import kernel_fields
from probes.btf import VMLINUX
from probes.loader import CHILD_PYTHON, Form, Job, Loaded, Program, load_probe
from probes.lost_events import LostEventCounter
from probes.maps import BpfMap, possible_cpus, sum_over_cpus
from probes.per_cgroup_probe import RemovedCgroupTracker, decode_durations, open_maps

FORMS = ("tp_btf", "raw_tp")
"""Forms in order of preference."""
MAX_CGROUP_DEVICES, MAX_REQUESTS = 2048, 8192
"""Sizes of the maps: 1.1 and 0.7 MiB."""
_LOST_FULL, _LOST_REQUEST = 0, 3
"""Reasons of per_cgroup.bpf.h: the map of cgroups and devices, or that of requests, is full."""
_COUNTERS = 2 + SLOT_COUNT
"""Number of counters of one direction: sum, bytes and the histogram."""
_FIELDS = {
    **kernel_fields.TASK_GROUP_FIELDS,
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
_ARGUMENT_VARIANTS = (((), "u8"), ((), "s32"), (("struct request_queue *",), "s32"))
"""Arguments of the tracepoints by kernel: the queue before the request at insertion and issue until a54895fa057c (Linux 5.11);
the type of the status at completion, an errno until Linux 5.16."""


def _form(name: str, before: Sequence[str], status: str, *, typed: bool) -> Form:
    issue, completion = (*before, *_REQUEST), (*_REQUEST, status, "u32")
    return Form(
        name=name,
        typed=typed,
        fields=_FIELDS,
        optional=_OPTIONAL,
        programs=[
            Program("on_insert", "block_rq_insert", "dtse_bio_insert", arguments=issue),
            Program("on_issue", "block_rq_issue", "dtse_bio_issue", arguments=issue),
            Program("on_complete", "block_rq_complete", "dtse_bio_done", arguments=completion),
        ],
        constants={"FIRST": len(before), **({"TYPED": 1} if typed else {})},
    )


_FORMS = {name: [_form(name, *variant, typed=name == "tp_btf") for variant in _ARGUMENT_VARIANTS] for name in FORMS}


class BlockIoProbe:
    """The running probe: a Probe (`api.interfaces`)."""

    name = "blockio"

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.form = loaded.form
        self._pairs: BpfMap | None = BpfMap(*loaded.maps["blockio"], possible_cpus())
        self._lost = BpfMap(*loaded.maps["lost"], possible_cpus())
        self._decoded: dict[tuple[int, int], tuple[list[int], BlockIo]] = {}
        self._removed = RemovedCgroupTracker()
        self._without_pair, self._without_request = LostEventCounter(), LostEventCounter()

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        """Return requests by cgroup id and device since the probe was opened. Raises Unavailable once closed."""
        with open_maps(self.name, is_open=self._pairs is not None):
            assert self._pairs is not None
            keys, values = self._pairs.items()
            if complete:
                self._delete_removed(self._pairs, live, keys.tolist())
            lost = [int(row[0]) for row in sum_over_cpus(self._lost.rows([0, 1, 2, 3]))]
            self._without_pair.update(lost[_LOST_FULL])
            self._without_request.update(lost[_LOST_REQUEST])
        rows = np.ascontiguousarray(values).view(np.uint64).reshape(len(values), 2 * _COUNTERS).tolist()
        return ProbeReading(self._by_cgroup(keys.tolist(), rows))

    def problem(self) -> Unavailable | None:
        """Return requests that were lost lately because a map was full, as of the latest read."""
        return self._without_pair.problem(
            f"block requests were not counted: there are more than {MAX_CGROUP_DEVICES} pairs of cgroup and device",
            "remove unused cgroups",
        ) or self._without_request.problem(
            f"block requests were not counted: more than {MAX_REQUESTS} were in flight",
            "report it with the agent's log: devices do not accept so many",
        )

    @property
    def lost_events(self) -> int | None:
        """Return the requests that were lost since the start, as of the latest read."""
        return self._without_pair.total + self._without_request.total

    def close(self) -> None:
        """Detach from the kernel. Idempotent."""
        self._pairs = None
        self._loaded.close()

    def _by_cgroup(self, keys: Sequence[tuple[int, int]], rows: Sequence[list[int]]) -> dict[int, dict[str, object]]:
        """Decode only rows that have changed: most disks are idle most of the time."""
        decoded: dict[tuple[int, int], tuple[list[int], BlockIo]] = {}
        devices: dict[int, dict[str, BlockIo]] = {}
        for key, row in zip(keys, rows, strict=True):
            previous = self._decoded.get(key)
            decoded[key] = previous if previous is not None and previous[0] == row else (row, decode(row))
            number, device = key
            devices.setdefault(number, {})[f"{device >> 32}:{device & 0xFFFFFFFF}"] = decoded[key][1]
        self._decoded = decoded
        return {number: {"block_io": by_device} for number, by_device in devices.items()}

    def _delete_removed(self, pairs: BpfMap, live: Mapping[int, str], keys: Sequence[tuple[int, int]]) -> None:
        removed = self._removed.removed_in((number for number, _ in keys), live)
        for key in keys:
            if key[0] in removed:
                pairs.delete(key)


def decode(row: Sequence[int]) -> BlockIo:
    """Decode `struct counters`, the direction of reads first: a sum, bytes and the slots of a histogram each."""
    reads, writes = row[:_COUNTERS], row[_COUNTERS:]
    return BlockIo(
        reads=decode_durations((reads[0], *reads[2:])),
        writes=decode_durations((writes[0], *writes[2:])),
        read_bytes=reads[1],
        write_bytes=writes[1],
    )


def job(forms: Sequence[str], btf: Path = VMLINUX) -> Job:
    """Return the loader's job."""
    here = Path(__file__).parent
    return Job(
        sources=[here / "per_cgroup.bpf.h", here / "blockio.bpf.c"],
        forms=[form for name in forms for form in _FORMS[name]],
        maps=["blockio", "lost"],
        constants={
            "HIST_SLOTS": SLOT_COUNT,
            "TASK_SLOTS": 1,
            "CGROUP_SLOTS": 1,
            "PAIRS": MAX_CGROUP_DEVICES,
            "REQUESTS": MAX_REQUESTS,
        },
        btf=btf,
        remedy="use Linux 5.5 or later, with CONFIG_BLOCK",
    )


def open_blockio(
    *, forms: Sequence[str] = FORMS, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX
) -> BlockIoProbe:
    """Start the probe in the first form that the kernel accepts. Raises Unavailable if it accepts none."""
    return load_probe(job(forms, btf), BlockIoProbe, child_python=child_python)
