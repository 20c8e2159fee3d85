"""Benchmarks: run from the repository as `python -m bench.NAME`; results with date and machine are in bench/results."""
