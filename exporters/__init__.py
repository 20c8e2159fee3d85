"""Publishes finished cycles: Prometheus, OpenTelemetry, Malachite's HTTP contract, the page and recordings.
Exporters read cycles and change nothing. Importing this package loads none of them.
"""

DEFAULT_RECORDING_MIB, MIN_RECORDING_MIB = 256, 16
"""Default and minimum size of a recording; defined here so that readers need not import the recorder."""
