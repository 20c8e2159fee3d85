"""Wakes the loop when the kernel reports memory or CPU pressure."""
