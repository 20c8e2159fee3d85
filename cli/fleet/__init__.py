"""`kubectl dioptase`: all agents of a cluster at once, through the API server."""
