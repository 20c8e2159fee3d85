"""Reads what identifies the machine: online CPUs and their topology, CPU generation, virtualization, network cards.
What sysfs leaves out is taken as one socket, one NUMA node, one L3 cache per NUMA node and one core per CPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from agent.sensors import parsers
from agent.sensors.cgroup.hierarchy import detect_hierarchy
from agent.sensors.kernel_files import MAX_ATTRIBUTE_BYTES, ProcSysFiles
from agent.sensors.parsers import number
from api.cpu import Cpu, Topology, parse_cpu_list
from api.interfaces import Unavailable
from api.node_resources import HardwareInventory, NetworkInterfaceCard
from api.snapshot import Machine
from common.files import read_small_file

_CPU_DIRECTORY, _NUMA_DIRECTORY = "devices/system/cpu", "devices/system/node"
_SYSTEMD_LIBRARY = re.compile(rb"/libsystemd-(?:core|shared)-([0-9]{1,4})")
MAX_MEMORY_MAP_BYTES = 1 << 20
_NUMBERED = re.compile(r"(?:cpu|node)([0-9]{1,4})", re.ASCII)


def read_online_cpus_text(sys: Path) -> str:
    """Return the kernel's list of online CPUs, which is cheap to read and changes with the topology; empty if missing."""
    return read_sysfs_text(sys / _CPU_DIRECTORY / "online")


def read_sysfs_text(path: Path) -> str:
    """Return the text of a sysfs file; empty if it is missing or too long."""
    try:
        content = read_small_file(path, MAX_ATTRIBUTE_BYTES)
    except OSError:
        return ""
    return content.decode("ascii", "replace").strip() if len(content) <= MAX_ATTRIBUTE_BYTES else ""


def read_topology(sys: Path, text: Callable[[Path], str] = read_sysfs_text) -> Topology:
    """Return the online CPUs. Never empty: without sysfs, the CPUs that Python counts."""
    numa = _numa_of_cpus(sys, text)
    return Topology(
        cpus=tuple(
            Cpu(
                id=cpu,
                core=_topology_id(text(sys / _CPU_DIRECTORY / f"cpu{cpu}/topology/core_id"), cpu),
                socket=_topology_id(text(sys / _CPU_DIRECTORY / f"cpu{cpu}/topology/physical_package_id"), 0),
                numa=numa.get(cpu, 0),
                l3=_topology_id(text(sys / _CPU_DIRECTORY / f"cpu{cpu}/cache/index3/id"), 0),
            )
            for cpu in _online_cpus(sys, text)
        )
    )


def _online_cpus(sys: Path, text: Callable[[Path], str]) -> tuple[int, ...]:
    listed = parse_cpus(text(sys / _CPU_DIRECTORY / "online"))
    if listed:
        return listed
    present = sorted(_numbered_entries(sys / _CPU_DIRECTORY, "cpu"))
    # Without the list, each CPU has its own file; CPU 0 usually cannot go offline and then has none.
    awake = tuple(cpu for cpu in present if text(sys / _CPU_DIRECTORY / f"cpu{cpu}/online") != "0")
    return awake or tuple(range(os.cpu_count() or 1))


def _numa_of_cpus(sys: Path, text: Callable[[Path], str]) -> dict[int, int]:
    return {
        cpu: node
        for node in sorted(_numbered_entries(sys / _NUMA_DIRECTORY, "node"))
        for cpu in parse_cpus(text(sys / _NUMA_DIRECTORY / f"node{node}/cpulist"))
    }


def _numbered_entries(directory: Path, prefix: str) -> list[int]:
    try:
        names = [entry.name for entry in directory.iterdir()]
    except OSError:
        return []
    return [int(match[1]) for name in names if name.startswith(prefix) and (match := _NUMBERED.fullmatch(name))]


def parse_cpus(listed: str) -> tuple[int, ...]:
    """Parse a list of CPUs; empty for no CPUs, and for a malformed list."""
    try:
        return parse_cpu_list(listed)
    except ValueError:
        return ()


def _topology_id(word: str, default: int) -> int:
    # The kernel writes -1 for a package or core that the firmware does not describe.
    return int(word) if word.isascii() and word.isdigit() and len(word) < 10 else default


_INTEL = {
    (6, 0x2D): "SandyBridge", (6, 0x3E): "IvyBridge", (6, 0x3F): "Haswell", (6, 0x4F): "Broadwell", (6, 0x56):
    "Broadwell", (6, 0x55): "SkyLake", (6, 0x6A): "IceLake", (6, 0x6C): "IceLake", (6, 0x8F): "SapphireRapids", (6,
    0xCF): "EmeraldRapids", (6, 0xAD): "GraniteRapids", (6, 0xAE): "GraniteRapids", (6, 0xAF): "SierraForest",
}  # fmt: skip
"""Server CPUs by family and model (arch/x86/include/asm/intel-family.h)."""
_CASCADE_LAKE_STEPPINGS, _COOPER_LAKE_STEPPINGS = (5, 6, 7), (10, 11)
"""Steppings of model 0x55; Sky Lake has 0 to 4."""
_AMD = (
    (0x17, 0x00, 0x1F, "AMD_K17Zen"),
    (0x17, 0x30, 0x4F, "AMD_K17Zen2"),
    (0x17, 0x60, 0xAF, "AMD_K17Zen2"),
    (0x19, 0x00, 0x0F, "AMD_K19Zen3"),
    (0x19, 0x20, 0x5F, "AMD_K19Zen3"),
    (0x19, 0x10, 0x1F, "AMD_K19Zen4"),
    (0x19, 0x60, 0xAF, "AMD_K19Zen4"),
    (0x1A, 0x00, 0x7F, "AMD_K1AZen5"),
)
"""Family, first and last model (arch/x86/kernel/cpu/amd.c), and the name."""
_VIRTUAL = (
    "qemu", "kvm", "vmware", "xen", "virtualbox", "innotek", "bochs", "firecracker", "bhyve", "google", "parallels",
)  # fmt: skip
"""Words in the firmware of virtual machines. Amazon and Microsoft use the same text on real machines."""


def read_machine(files: ProcSysFiles) -> Machine:
    """Return the machine of the first CPU; machines with CPUs of several kinds have no codename."""
    fields = parse_first_cpu(files.read_optional(files.proc / "cpuinfo", keep=True))
    return Machine(
        codename=cpu_codename(fields),
        is_vm=_is_vm(files, fields),
        cgroup_version=_cgroup_version(files.proc),
        systemd_version=parse_systemd_version(_read_memory_map_of_init(files.proc)),
    )


def parse_systemd_version(memory_map: bytes) -> int | None:
    """Return systemd's version from the names of its private libraries in /proc/1/maps; None without them."""
    match = _SYSTEMD_LIBRARY.search(memory_map)
    return int(match[1]) if match is not None else None


def _read_memory_map_of_init(proc: Path) -> bytes:
    try:
        return read_small_file(proc / "1/maps", MAX_MEMORY_MAP_BYTES)
    except OSError:
        # Without SYS_PTRACE the kernel refuses the memory map of a process with more capabilities.
        return b""


def _cgroup_version(proc: Path) -> str:
    try:
        return detect_hierarchy(proc).mode
    except (OSError, Unavailable):
        return ""


def parse_first_cpu(text: bytes) -> dict[str, str]:
    """Parse the first block of /proc/cpuinfo."""
    fields = {}
    for line in text.partition(b"\n\n")[0].split(b"\n"):
        key, colon, value = line.partition(b":")
        if colon:
            fields[parsers.name(key.strip())] = value.strip().decode("ascii", "replace")
    return fields


def cpu_codename(fields: dict[str, str]) -> str:
    """Return the CPU generation in Malachite's spelling; empty if unknown."""
    numbers = [number(fields.get(key, "").encode()) for key in ("cpu family", "model", "stepping")]
    if numbers[0] is None or numbers[1] is None:
        return ""
    family, model, stepping = numbers[0], numbers[1], numbers[2]
    if fields.get("vendor_id") in ("AuthenticAMD", "HygonGenuine"):
        return next((name for f, first, last, name in _AMD if f == family and first <= model <= last), "")
    if fields.get("vendor_id") != "GenuineIntel" or (family, model) not in _INTEL:
        return ""
    if (family, model) == (6, 0x55) and stepping in _CASCADE_LAKE_STEPPINGS:
        return "Intel_CascadeLake"
    if (family, model) == (6, 0x55) and stepping in _COOPER_LAKE_STEPPINGS:
        return "Intel_CooperLake"
    return f"Intel_{_INTEL[family, model]}"


def _is_vm(files: ProcSysFiles, fields: dict[str, str]) -> bool | None:
    if "flags" in fields:
        return "hypervisor" in fields["flags"].split()
    # Architectures without such a flag: Xen's own file, then the firmware's description.
    if files.read_optional(files.sys / "hypervisor/type").strip():
        return True
    described = [files.read_optional(files.sys / "class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    text = b" ".join(described).decode("ascii", "replace").lower()
    if not text.strip():
        return None
    return any(word in text for word in _VIRTUAL)


_MAX_CPUINFO_BYTES = 16 << 10
"""Limit of one CPU in /proc/cpuinfo; a CPU with many flags has 2 KiB."""
_MAX_CARDS = 64


def read_hardware(proc: Path, sys: Path) -> HardwareInventory:
    """Return CPU flags and network cards; what cannot be read is absent. Never raises."""
    return HardwareInventory(flags=_read_cpu_flags(proc / "cpuinfo"), cards=_read_cards(sys / "class/net"))


def _read_cpu_flags(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            fields = parse_first_cpu(file.read(_MAX_CPUINFO_BYTES))
    except OSError:
        return ()
    # arm64 has `Features`.
    return tuple((fields.get("flags") or fields.get("Features") or "").split())


def _read_cards(directory: Path) -> tuple[NetworkInterfaceCard, ...]:
    try:
        names = sorted(entry.name for entry in directory.iterdir() if (entry / "device").exists())
    except OSError:
        return ()
    return tuple(_read_card(directory / name) for name in names[:_MAX_CARDS])


def _read_card(path: Path) -> NetworkInterfaceCard:
    device = (path / "device").resolve()
    # The device of a virtual card is virtio's; its parent is on the PCI bus.
    on_bus = (name for name in (device.name, device.parent.name) if name.count(":") == 2)
    return NetworkInterfaceCard(
        name=path.name,
        index=_signed_int(read_sysfs_text(path / "ifindex"), 0),
        numa=_signed_int(read_sysfs_text(path / "device/numa_node"), -1),
        pci=next(on_bus, ""),
        speed_mbit=_signed_int(read_sysfs_text(path / "speed"), -1),
        enabled=read_sysfs_text(path / "operstate") == "up",
    )


def _signed_int(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.removeprefix("-").isdigit() and len(text) < 10 else default
