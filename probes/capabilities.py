"""Root's powers, one by one: which of those that a probe needs this process lacks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

NUMBERS = {"DAC_READ_SEARCH": 2, "NET_ADMIN": 12, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "PERFMON": 38, "BPF": 39}
"""As include/uapi/linux/capability.h numbers them; names without CAP_, as Kubernetes spells them."""
_INCLUDED = {"BPF": "SYS_ADMIN", "PERFMON": "SYS_ADMIN"}
"""Parts of an older, larger power, which gives them too."""


def missing(names: Iterable[str], proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Those of the capabilities that are not in force for this process; none where that cannot be read."""
    try:
        lines = (proc / "self/status").read_text().splitlines()
        held = int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16)
    except (OSError, ValueError, IndexError, StopIteration):
        return ()
    return tuple(name for name in names if not _held(name, held))


def _held(name: str, held: int) -> bool:
    larger = _INCLUDED.get(name, name)
    return bool(held >> NUMBERS[name] & 1 or held >> NUMBERS[larger] & 1)
