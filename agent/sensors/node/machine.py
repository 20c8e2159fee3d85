"""Reads what identifies the machine: online CPUs and their topology, CPU generation, virtualization, network cards.
What sysfs leaves out is taken as one socket, one NUMA node, one L3 cache per NUMA node and one core per CPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from agent.sensors import parsers
from agent.sensors.kernel_files import MAX_ATTRIBUTE_BYTES, ProcSysFiles
from agent.sensors.parsers import number
from api.cpu import Cpu, Topology, parse_cpu_list
from api.measurements import Machine
from api.node_resources import HardwareInventory, NetworkInterfaceCard
from common.files import read_small_file

_CPU_DIRECTORY, _NUMA_DIRECTORY = "devices/system/cpu", "devices/system/node"
_NUMBERED = re.compile(r"(?:cpu|node)([0-9]{1,4})", re.ASCII)


def read_online_cpus_text(sys: Path) -> str:
    """The kernel's list of online CPUs: cheap to read, and different whenever the topology is. Empty where it is missing."""
    return read_sysfs_text(sys / _CPU_DIRECTORY / "online")


def read_sysfs_text(path: Path) -> str:
    """What a file of sysfs says; empty where there is none, and where it is longer than any of them."""
    try:
        said = read_small_file(path, MAX_ATTRIBUTE_BYTES)
    except OSError:
        return ""
    return said.decode("ascii", "replace").strip() if len(said) <= MAX_ATTRIBUTE_BYTES else ""


def read_topology(sys: Path, text: Callable[[Path], str] = read_sysfs_text) -> Topology:
    """CPUs that are online now. Never empty: a node without sysfs still has the CPUs that Python counts."""
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
    listed = _parse_cpus_or_none(text(sys / _CPU_DIRECTORY / "online"))
    if listed:
        return listed
    present = sorted(_numbered_entries(sys / _CPU_DIRECTORY, "cpu"))
    # Without the list each CPU says for itself; CPU 0 usually cannot go offline and then has no such file.
    awake = tuple(cpu for cpu in present if text(sys / _CPU_DIRECTORY / f"cpu{cpu}/online") != "0")
    return awake or tuple(range(os.cpu_count() or 1))


def _numa_of_cpus(sys: Path, text: Callable[[Path], str]) -> dict[int, int]:
    return {
        cpu: node
        for node in sorted(_numbered_entries(sys / _NUMA_DIRECTORY, "node"))
        for cpu in _parse_cpus_or_none(text(sys / _NUMA_DIRECTORY / f"node{node}/cpulist"))
    }


def _numbered_entries(directory: Path, prefix: str) -> list[int]:
    try:
        names = [entry.name for entry in directory.iterdir()]
    except OSError:
        return []
    return [int(match[1]) for name in names if name.startswith(prefix) and (match := _NUMBERED.fullmatch(name))]


def _parse_cpus_or_none(listed: str) -> tuple[int, ...]:
    try:
        return parse_cpu_list(listed)
    except ValueError:
        return ()


def _topology_id(word: str, default: int) -> int:
    # -1 is what kernels say of a package or core that the firmware does not describe.
    return int(word) if word.isascii() and word.isdigit() and len(word) < 10 else default


_INTEL = {
    (6, 0x2D): "SandyBridge",
    (6, 0x3E): "IvyBridge",
    (6, 0x3F): "Haswell",
    (6, 0x4F): "Broadwell",
    (6, 0x56): "Broadwell",
    (6, 0x55): "SkyLake",
    (6, 0x6A): "IceLake",
    (6, 0x6C): "IceLake",
    (6, 0x8F): "SapphireRapids",
    (6, 0xCF): "EmeraldRapids",
    (6, 0xAD): "GraniteRapids",
    (6, 0xAE): "GraniteRapids",
    (6, 0xAF): "SierraForest",
}
"""Servers, by family and model (arch/x86/include/asm/intel-family.h)."""
_CASCADE_LAKE_STEPPINGS, _COOPER_LAKE_STEPPINGS = (5, 6, 7), (10, 11)
"""Of model 0x55; Sky Lake has 0 to 4."""
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
    "qemu",
    "kvm",
    "vmware",
    "xen",
    "virtualbox",
    "innotek",
    "bochs",
    "firecracker",
    "bhyve",
    "google",
    "parallels",
)
"""In what firmware says of a virtual machine. Amazon and Microsoft write the same on real ones."""


def read_machine(files: ProcSysFiles) -> Machine:
    """Of the first CPU; machines with CPUs of several kinds have no name."""
    fields = parse_first_cpu(files.look(files.proc / "cpuinfo", keep=True))
    return Machine(codename=cpu_codename(fields), is_vm=_is_vm(files, fields))


def parse_first_cpu(text: bytes) -> dict[str, str]:
    """The first block of /proc/cpuinfo."""
    found = {}
    for line in text.partition(b"\n\n")[0].split(b"\n"):
        key, colon, value = line.partition(b":")
        if colon:
            found[parsers.name(key.strip())] = value.strip().decode("ascii", "replace")
    return found


def cpu_codename(fields: dict[str, str]) -> str:
    """The generation in Malachite's spelling; empty where it is unknown."""
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
    if files.look(files.sys / "hypervisor/type").strip():
        return True
    described = [files.look(files.sys / "class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    text = b" ".join(described).decode("ascii", "replace").lower()
    if not text.strip():
        return None
    return any(word in text for word in _VIRTUAL)


_MAX_CPUINFO_BYTES = 16 << 10
"""Of one CPU in /proc/cpuinfo; that of one with many flags has 2 KiB."""
_MAX_CARDS = 64


def read_hardware(proc: Path, sys: Path) -> HardwareInventory:
    """Never raises: what cannot be read is not there."""
    return HardwareInventory(flags=_read_cpu_flags(proc / "cpuinfo"), cards=_read_cards(sys / "class/net"))


def _read_cpu_flags(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            said = parse_first_cpu(file.read(_MAX_CPUINFO_BYTES))
    except OSError:
        return ()
    # Other architectures have `Features`.
    return tuple((said.get("flags") or said.get("Features") or "").split())


def _read_cards(directory: Path) -> tuple[NetworkInterfaceCard, ...]:
    try:
        names = sorted(entry.name for entry in directory.iterdir() if (entry / "device").exists())
    except OSError:
        return ()
    return tuple(_read_card(directory / name) for name in names[:_MAX_CARDS])


def _read_card(path: Path) -> NetworkInterfaceCard:
    device = (path / "device").resolve()
    # Of a virtual card the device is virtio's, and what it is on is on the bus.
    on_bus = (name for name in (device.name, device.parent.name) if name.count(":") == 2)
    return NetworkInterfaceCard(
        name=path.name,
        index=_signed_int(read_sysfs_text(path / "ifindex"), 0),
        numa=_signed_int(read_sysfs_text(path / "device/numa_node"), -1),
        pci=next(on_bus, ""),
        speed_mbit=_signed_int(read_sysfs_text(path / "speed"), -1),
        enabled=read_sysfs_text(path / "operstate") == "up",
    )


def _signed_int(said: str, unknown: int) -> int:
    return int(said) if said.isascii() and said.removeprefix("-").isdigit() and len(said) < 10 else unknown
