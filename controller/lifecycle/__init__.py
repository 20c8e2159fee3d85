"""Objects that every node has, and taints and evictions for nodes without a ready agent."""
