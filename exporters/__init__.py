"""Rounds to the outside: Prometheus, OpenTelemetry, HTTP. Reads rounds, changes nothing."""
