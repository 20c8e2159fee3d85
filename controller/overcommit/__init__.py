"""Overcommit ratios of nodes, from the NodeOvercommitConfig of their pool and what their agents recommend."""
