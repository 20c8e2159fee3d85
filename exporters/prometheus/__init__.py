"""Exports metrics in the Prometheus exposition format."""
