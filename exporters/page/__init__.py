"""The web page, its HTTP API, and health endpoints."""
