"""Generators of docs/settings.md and docs/metrics.md; not part of the image."""
