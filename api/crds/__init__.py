"""Katalyst's custom resources (katalyst.kubewharf.io, v0.5) as types, from which their definitions in deploy/crds are made.

Absent is None throughout, also for lists and maps, and nothing of Python's own is a default on the wire: what decodes
from an object encodes to the same object again. Fields that are not known here are passed over when decoding, so whoever
writes to an object of somebody else patches it and never replaces it.
"""
