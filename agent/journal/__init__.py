"""The agent's records of decisions and evictions, and its log."""
