"""CPU and memory headroom for reclaimed pods, computed by the configured policy, and its reporter."""
