"""Response times of a small service that runs in the cgroups of an online pod."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.pods import Pod

PERIOD_MS, WORK_MS = 10, 1
SERVICE = f"""
import array, sys, time
due = time.monotonic()
while True:
    due += {PERIOD_MS} / 1000
    time.sleep(max(0.0, due - time.monotonic()))
    worked = time.thread_time()
    while time.thread_time() - worked < {WORK_MS} / 1000:
        pass
    array.array("d", (due, (time.monotonic() - due) * 1000)).tofile(sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""
"""A request falls due every PERIOD_MS and takes WORK_MS of CPU time; it waits if the one before it has not ended. Each writes
the time at which it was due, in s, and its response time in ms."""


class ResponseTimes:
    """The service; `close` ends it."""

    def __init__(self, pod: Pod, file: Path) -> None:
        self._file = file
        name = pod.read()["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        containers = [
            path for controller in ("cpu", "cpuset", "memory") for path in pod.cgroups(controller) if path.name == name
        ]
        with file.open("wb") as output:
            self._process = subprocess.Popen([sys.executable, "-c", SERVICE], stdout=output)
        for container in containers:
            (container / "cgroup.procs").write_text(str(self._process.pid))

    def between(self, begin_s: float, end_s: float) -> Sequence[float]:
        """Return the response times in ms of the requests that fell due in this interval of the monotonic clock."""
        values = array("d")
        data = self._file.read_bytes()
        values.frombytes(data[: len(data) // 16 * 16])
        return [ms for due_s, ms in zip(values[::2], values[1::2], strict=True) if begin_s <= due_s < end_s]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
