"""Eviction plugins in processes of their own, as the manager sees them."""
