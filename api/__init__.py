"""The vocabulary that every other package speaks: frozen facts, decisions, metric names and the pure arithmetic on them.

Imports nothing of ours and does no I/O. Facts carry the kernel's own units in their names (`wait_ns`, `memory_bytes`);
an absent value is None, never 0 or -1.
"""

VERSION = "0.1.0"
"""As in pyproject.toml. Asking the installed package would take half a MiB of modules, in an agent that must stay small."""
