"""Checks of the host and of the kubelet, for `dioptase doctor` and the page."""
