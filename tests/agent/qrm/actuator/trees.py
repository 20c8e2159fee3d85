"""A cgroup tree of ordinary files in the formats of both versions, without the kernel's refusals, and an actuator on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.state_dir import open_originals
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import ActMode, Decision, Outcome
from api.knobs import Knob, Reason

S = 1_000_000_000
BOOT = "boot"
MODES = ("v1", "v2", "hybrid")
ALL_CPUS, ALL_NODES = "0-3", "0-1"
UNLIMITED = "9223372036854771712\n"
V1 = {
    "cpu": {
        "cpu.shares": "1024\n",
        "cpu.cfs_quota_us": "-1\n",
        "cpu.cfs_period_us": "100000\n",
        "cpu.cfs_burst_us": "0\n",
        "cpu.idle": "0\n",
    },
    "cpuset": {
        "cpuset.cpus": f"{ALL_CPUS}\n",
        "cpuset.effective_cpus": f"{ALL_CPUS}\n",
        "cpuset.mems": f"{ALL_NODES}\n",
        "cpuset.effective_mems": f"{ALL_NODES}\n",
        "cpuset.memory_migrate": "0\n",
    },
    "memory": {
        "memory.limit_in_bytes": UNLIMITED,
        "memory.memsw.limit_in_bytes": UNLIMITED,
        "memory.usage_in_bytes": "0\n",
        "memory.stat": "total_inactive_file 0\ntotal_active_file 0\n",
        "memory.force_empty": "",
        "memory.numa_stat": "total=0 N0=0 N1=0\nhierarchical_total=0 N0=0 N1=0\n",
    },
    "blkio": {
        "blkio.bfq.weight": "100\n",
        "blkio.throttle.read_bps_device": "",
        "blkio.throttle.write_bps_device": "",
        "blkio.throttle.read_iops_device": "",
        "blkio.throttle.write_iops_device": "",
    },
    "net_cls": {"net_cls.classid": "0\n"},
}
V2 = {
    "cpu.weight": "100\n",
    "cpu.max": "max 100000\n",
    "cpu.max.burst": "0\n",
    "cpu.idle": "0\n",
    "cpuset.cpus": "\n",
    "cpuset.cpus.effective": f"{ALL_CPUS}\n",
    "cpuset.mems": "\n",
    "cpuset.mems.effective": f"{ALL_NODES}\n",
    "memory.max": "max\n",
    "memory.high": "max\n",
    "memory.low": "0\n",
    "memory.min": "0\n",
    "memory.swap.max": "max\n",
    "memory.current": "0\n",
    "memory.stat": "inactive_file 0\nactive_file 0\n",
    "memory.reclaim": "",
    "memory.numa_stat": "anon N0=0 N1=0\nfile N0=0 N1=0\n",
    "io.weight": "default 100\n",
    "io.max": "",
}
REASON = Reason(rule="wait_above_target", text="online pods waited 9 ms, which is above 2 ms")


class Tree:
    """`mode` is v1, v2 or hybrid."""

    def __init__(self, root: Path, mode: str) -> None:
        v1 = {} if mode == "v2" else {name: root / name for name in V1}
        self.hierarchy = Hierarchy(v1=v1, v2=None if mode == "v1" else root / "unified")
        self._root = root
        self._removed: list[Path] = []
        self._mounts = [*v1.values(), *filter(None, [self.hierarchy.v2])]
        for mount in self._mounts:
            mount.mkdir(parents=True)
        self._fill("/")

    def make(self, path: str, texts: Mapping[str, str] | None = None) -> int:
        """Create a cgroup with the kernel's defaults in every hierarchy, except these texts by file; return its id."""
        for mount in self._mounts:
            (mount / path.lstrip("/")).mkdir()
        self._fill(path)
        for name, text in (texts or {}).items():
            self.file(path, name).write_text(f"{text}\n")
        return self.id(path)

    def remove(self, path: str) -> None:
        """Remove the cgroup. Its inodes stay in use outside the tree, because the kernel never reuses an id."""
        for number, mount in enumerate(self._mounts):
            target = self._root / "removed" / f"{len(self._removed)}-{number}"
            self._removed.append(target)
            target.parent.mkdir(exist_ok=True)
            (mount / path.lstrip("/")).rename(target)

    def id(self, path: str) -> int:
        return (self.hierarchy.primary / path.lstrip("/")).stat().st_ino

    def file(self, path: str, name: str) -> Path:
        mount = self.hierarchy.controller(name.split(".", maxsplit=1)[0])
        assert mount is not None
        return mount / path.lstrip("/") / name

    def texts(self, path: str) -> Mapping[str, str]:
        """Return the content of every file of the cgroup by file name."""
        mounts = set(filter(None, map(self.hierarchy.controller, V1)))
        return {file.name: file.read_text() for mount in mounts for file in (mount / path.lstrip("/")).glob("*.*")}

    def decision(self, path: str, knob: Knob, value: str, cgroup_id: int | None = None) -> Decision:
        return Decision(
            cgroup=path,
            cgroup_id=self.id(path) if cgroup_id is None else cgroup_id,
            pod="default/batch",
            knob=knob,
            value=value,
            reason=REASON,
        )

    def _fill(self, path: str) -> None:
        places = {name: (self.hierarchy.v1[name], V1[name]) for name in self.hierarchy.v1}
        if self.hierarchy.mode == "v2":
            assert self.hierarchy.v2 is not None
            places = {"": (self.hierarchy.v2, V2)}
        for mount, files in places.values():
            for name, text in files.items():
                (mount / path.lstrip("/") / name).write_text(text)


class Bench:
    """A tree with cgroups, /batch by default, and an actuator that writes to it."""

    def __init__(
        self,
        root: Path,
        mode: str,
        act: ActMode = ActMode.ON,
        cgroups: Sequence[str] = ("/batch",),
        writer: type[KnobWriter] = KnobWriter,
    ) -> None:
        self.tree = Tree(root / "cgroup", mode)
        for path in cgroups:
            self.tree.make(path)
        self.files = writer(self.tree.hierarchy)
        self.originals: OriginalsJournal = open_originals(root / "state", BOOT)
        self.actuator = Actuator(self.files, self.originals, act)

    def apply(self, *requests: tuple[str, Knob, str], at_s: float | None = None) -> tuple[Outcome, ...]:
        """Apply the requests in one cycle; without a time the recheck cache is not used."""
        decisions = [self.tree.decision(*request) for request in requests]
        return self.actuator.apply(decisions, None if at_s is None else int(at_s * S))

    def journalled(self) -> dict[tuple[str, Knob], dict[str, str]]:
        return {(entry.cgroup, entry.knob): dict(entry.raw.texts) for entry in self.originals.entries()}

    def close(self) -> None:
        self.files.close()
        self.originals.close()
