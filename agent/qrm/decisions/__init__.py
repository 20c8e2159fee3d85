"""Turns advice and settings into decisions: one knob of one cgroup gets one value, with the reason. Pure."""
