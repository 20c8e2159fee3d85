"""Sockets shared with a stock Katalyst, in both directions: advisor, resource plugins, other plugins.
Loaded only where the settings name a socket, because gRPC takes 12 MiB."""
