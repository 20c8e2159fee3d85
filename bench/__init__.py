"""Benchmarks: run `python -m bench.NAME` from the repository; dated results are in bench/results."""
