"""Reads facts of the whole node from /proc and /sys."""
