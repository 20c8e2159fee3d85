"""Eviction as in Katalyst's eviction manager: plugins evaluate thresholds, an evictor carries out the result."""
