"""Deployment artefacts: image, chart, and manifests generated from the code."""
