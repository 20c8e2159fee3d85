"""Sensors read kernel files, pods and pod indicators and freeze them into one Snapshot per cycle.
Nothing in this package decides or writes.
"""
