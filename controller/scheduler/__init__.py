"""Plugins, state and HTTP extender of the scheduler."""
