"""Independent reads of /proc, /sys and version 1's cgroup files: nothing of ours, one file and one value at a time."""

from __future__ import annotations

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


class Files:
    """The files of one version 1 cgroup."""

    def __init__(self, path: str) -> None:
        self.path = path

    def number(self, controller: str, name: str) -> int:
        return int((CGROUPS / controller / self.path.lstrip("/") / name).read_text())

    def keyed(self, controller: str, name: str, key: str) -> int:
        text = (CGROUPS / controller / self.path.lstrip("/") / name).read_text()
        return int(dict(line.split(" ", 1) for line in text.splitlines())[key])

    def memory(self, key: str) -> int:
        return self.keyed("memory", "memory.stat", key)

    def numa_pages(self, kind: str, node: int) -> int:
        text = (CGROUPS / "memory" / self.path.lstrip("/") / "memory.numa_stat").read_text()
        for line in text.splitlines():
            words = line.split()
            if words[0].startswith(f"{kind}="):
                return int(dict(word.split("=") for word in words[1:])[f"N{node}"])
        raise KeyError(kind)

    def per_cpu(self) -> list[int]:
        text = (CGROUPS / "cpuacct" / self.path.lstrip("/") / "cpuacct.usage_percpu").read_text()
        return [int(word) for word in text.split()]

    def blocks(self, name: str, kind: str) -> int:
        """Of all devices together."""
        text = (CGROUPS / "blkio" / self.path.lstrip("/") / f"blkio.throttle.{name}_recursive").read_text()
        return sum(int(line.split()[2]) for line in text.splitlines() if line.split()[1] == kind)


def meminfo(key: str, node: int | None = None) -> int:
    """Bytes."""
    path = "/proc/meminfo" if node is None else f"/sys/devices/system/node/node{node}/meminfo"
    for line in Path(path).read_text().splitlines():
        words = line.split()
        name = words[0] if node is None else words[2]
        if name == f"{key}:":
            return 1024 * int(words[1] if node is None else words[3])
    raise KeyError(key)


def vmstat(key: str) -> int:
    return int(dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())[key])


def netstat(protocol: str, key: str) -> int:
    for name in ("/proc/net/snmp", "/proc/net/netstat"):
        lines = [line.split() for line in Path(name).read_text().splitlines()]
        for names, values in zip(lines[::2], lines[1::2], strict=True):
            if names[0] == f"{protocol}:" and key in names:
                return int(values[names.index(key)])
    raise KeyError(key)


def interface(name: str) -> tuple[list[int], list[int]]:
    """What it received and what it sent, as /proc/net/dev lists them."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith(f"{name}:"):
            values = [int(word) for word in line.partition(":")[2].split()]
            return values[:8], values[8:]
    raise KeyError(name)


def disk(name: str) -> tuple[int, int, int]:
    """Reads, writes and milliseconds busy."""
    for line in Path("/proc/diskstats").read_text().splitlines():
        words = line.split()
        if words[2] == name:
            return int(words[3]), int(words[7]), int(words[12])
    raise KeyError(name)


def cpus_of(node: int) -> list[int]:
    actual: list[int] = []
    for part in Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip().split(","):
        first, _, last = part.partition("-")
        actual += range(int(first), int(last or first) + 1)
    return actual
