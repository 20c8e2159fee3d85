"""Two ordinary workloads, used by `make run` and by the benchmarks: a request-serving online service and a greedy batch job."""
