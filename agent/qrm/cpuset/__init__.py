"""Chooses the CPUs and NUMA nodes of every pool and container from pool sizes. Pure."""
