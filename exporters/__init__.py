"""Rounds to the outside: Prometheus, OpenTelemetry, HTTP. Reads rounds, changes nothing."""

RECORD_MIB, LEAST_RECORD_MIB = 256, 16
"""How large a recording may grow unless told otherwise, and what it needs; here, for most never load what makes one."""
