"""Settings of the agent: one module per subsystem, the loader, and the check against the node."""
