"""Exports metrics and traces by OpenTelemetry."""
