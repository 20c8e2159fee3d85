"""Scheduler extender: places pods by what the agents of the nodes report, as an HTTP extender of a stock kube-scheduler."""
