"""Views of single probes for `dioptase probe NAME`: one for all of them, and better ones for those that deserve it."""
