"""Writes and reads recordings of cycles."""
