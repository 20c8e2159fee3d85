"""Resource advice for one node: pure functions of snapshot, configuration, previous state and time.
Nothing in this package reads a file, a clock or a random number.
"""
