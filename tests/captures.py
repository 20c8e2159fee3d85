"""Captured machines: archives of `dioptase capture`, unpacked, and read as if they were this one."""

from __future__ import annotations

import tarfile
from contextlib import ExitStack
from pathlib import Path

import msgspec

from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.cgroup.hierarchy import Hierarchy, detect_hierarchy
from agent.sensors.cgroup.schedstat import SchedstatRunqLatency
from agent.sensors.node.node_reader import NodeReader
from agent.sensors.pods.pod_indicators import PodIndicatorScraper
from agent.sensors.snapshot import Sensor
from api.pod import Pod
from api.snapshot import Snapshot
from cli.capture import MANIFEST, CaptureManifest

CAPTURES = Path(__file__).parent / "captures"


class NoPods:
    """A PodSource of a node without pods."""

    def read(self) -> tuple[Pod, ...]:
        return ()


class Captured:
    """One archive, unpacked below `root`."""

    def __init__(self, archive: Path, root: Path) -> None:
        with tarfile.open(archive) as tar:
            tar.extractall(root, filter="data")
        self.root = root
        self.manifest = msgspec.json.decode((root / MANIFEST).read_bytes(), type=CaptureManifest)
        mounted = detect_hierarchy(root / "proc")
        self.hierarchy = Hierarchy(
            v1={name: self._here(mount) for name, mount in mounted.v1.items() if self._here(mount).exists()},
            v2=None if mounted.v2 is None else self._here(mounted.v2),
        )

    def snapshot(self) -> Snapshot:
        """What the sensor says of it; waits are no files and are absent."""
        with ExitStack() as stack:
            cgroups = CgroupReader(self.hierarchy)
            stack.callback(cgroups.close)
            node = NodeReader(self.root / "proc", self.root / "sys", live=False)
            stack.callback(node.close)
            sensor = Sensor(
                cgroups=cgroups,
                node=node,
                sys=self.root / "sys",
                pods=NoPods(),
                waits=SchedstatRunqLatency(self.root / "proc", self.hierarchy),
                indicators=PodIndicatorScraper(),
            )
            return sensor.snapshot(1, 1, 1)

    def _here(self, mount: Path) -> Path:
        return self.root / mount.relative_to("/")
