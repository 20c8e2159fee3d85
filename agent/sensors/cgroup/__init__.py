"""Reads cgroup files of both cgroup versions."""
