"""A thin client of the Kubernetes API server: credentials, requests, watches, an in-memory copy, work queues and leases.

It knows no kind of ours: callers bring a `Resource` with the struct that its objects are decoded into, and pay for the
fields that they name. docs/adr/0005-own-client.md says why this is not the official client.
"""
