"""Messages of the protocols that Kubernetes and Katalyst speak over Unix sockets.

The `.proto` files are ours to edit; `python -m tests.protocols` writes the Python beside them, messages alone: what
calls and serves them is common/grpc_unix.py, made from the descriptors. Importing one loads protobuf's runtime.
"""
