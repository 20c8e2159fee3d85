"""Admission webhooks: reviews of pods, Nodes and configuration, for the API server, by every replica of the controller."""
