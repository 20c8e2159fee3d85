"""Node-level eviction: plugins judge, the manager chooses, a killer acts."""
