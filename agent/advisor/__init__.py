"""Policies: pure functions of (snapshot, config, memory, now). No I/O, no clock, no randomness."""
