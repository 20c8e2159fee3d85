"""Eviction plugins, one file each, named as the plugin in `eviction.plugins`; every plugin is a pure function."""
