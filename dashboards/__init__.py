"""Generators of the Grafana dashboards."""
