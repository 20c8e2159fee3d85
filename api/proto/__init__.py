"""Messages of the protocols that Kubernetes and Katalyst use over Unix sockets.

Edit the `.proto` files; `python -m tests.protocols` generates the Python modules with messages only. Clients and servers
are built from the descriptors by common/grpc_unix.py. Importing a module loads the protobuf runtime.
"""
