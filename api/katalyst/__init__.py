"""Katalyst's custom resources (katalyst.kubewharf.io, v0.5) as structs; deploy/crds is generated from them.
An absent field is None, also for lists and maps, so that a decoded object encodes to the same object. Unknown
fields are ignored when decoding: patch a foreign object, never replace it. The docstring of a field is its `kubectl
explain` text.
"""
