"""Serves Malachite's HTTP contract from snapshots: a stock Katalyst agent can be pointed at it unchanged.
One module per family makes its documents, as pure functions of a snapshot and the counters of five seconds ago;
`server` answers. docs/malachite.md lists the source of every field.
"""
