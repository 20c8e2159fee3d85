"""Shared vocabulary of all packages: frozen structs, the metric catalogue, and pure arithmetic on them.
Does no I/O and imports no other package of this program. Names carry the kernel's units (`_ns`, `_bytes`); an
absent value is None, never 0 or -1.
"""

VERSION = "0.1.0"
"""As in pyproject.toml. Asking the installed package would take half a MiB of modules, in an agent that must stay small."""
