"""Light client of the Kubernetes API server: requests, watches, informers, work queues and leader election.
It knows no kind of this program: callers pass a ResourceType with the struct that objects are decoded into.
docs/adr/0005-own-client.md explains why the official client is not used here.
"""
