"""What does not change while the machine runs: the CPU's generation, and whether it is a virtual machine."""

from __future__ import annotations

from agent.sense import parsers
from agent.sense.node_files import NodeFiles
from agent.sense.parsers import number
from api.facts import Machine

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


def read_machine(files: NodeFiles) -> Machine:
    """Of the first CPU; machines with CPUs of several kinds have no name."""
    fields = first_cpu(files.look(files.proc / "cpuinfo", keep=True))
    return Machine(codename=codename(fields), is_vm=_is_vm(files, fields))


def first_cpu(text: bytes) -> dict[str, str]:
    """The first block of /proc/cpuinfo."""
    found = {}
    for line in text.partition(b"\n\n")[0].split(b"\n"):
        key, colon, value = line.partition(b":")
        if colon:
            found[parsers.name(key.strip())] = value.strip().decode("ascii", "replace")
    return found


def codename(fields: dict[str, str]) -> str:
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


def _is_vm(files: NodeFiles, fields: dict[str, str]) -> bool | None:
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
