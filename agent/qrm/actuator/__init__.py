"""Applies decisions to the kernel; the only package that writes knobs, with a journal of original values."""
