"""Publishes finished cycles: Prometheus, OpenTelemetry, Malachite's HTTP contract, the page and recordings.
Exporters read cycles and change nothing. Importing this package loads none of them.
"""

DEFAULT_RECORDING_MIB, MIN_RECORDING_MIB = 256, 16
"""How large a recording may grow unless told otherwise, and what it needs; here, for most never load what makes one."""
