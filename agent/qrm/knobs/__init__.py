"""Describes the kernel controls: notation, files, codecs, clamps, and texts for disks and resctrl. Pure."""
