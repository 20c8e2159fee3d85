"""Carries out advice: chooses cpusets, decides on cgroup knobs, and applies the decisions (Katalyst's QRM).
`cpuset`, `decisions` and `knobs` are pure; `actuator` alone writes to the kernel.
"""
