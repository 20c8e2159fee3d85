"""Memory advice: headroom for reclaimed pods, memory pressure, and which cgroups release memory."""
