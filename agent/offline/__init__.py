"""Replay of recordings, archives of what the agent reads, and simulation: nothing here acts on a node."""
