"""Overcommit ratios of nodes, from the NodeOvercommitConfig of their pool and the recommendation of their agents."""
