"""How much CPU and memory can be promised to reclaimed pods: by region, by the reclaim pool, and Koordinator's way. Pure."""
