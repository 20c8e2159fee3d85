"""Advice into cgroup writes: pure planning, a table of knobs, a journal of originals and the actuator."""
