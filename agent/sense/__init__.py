"""Readers: kernel files, pods and indicators, frozen into one Snapshot. Nothing here decides or writes."""
