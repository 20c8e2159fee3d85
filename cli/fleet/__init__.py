"""All agents of a cluster at once, through the API server: `kubectl dioptase`."""
