"""Malachite's HTTP contract, served from our snapshots: an unchanged Katalyst agent can be pointed at it.

`past` keeps what rates need, one module per family makes its documents (pure functions of a snapshot and that past), and
`server` answers. What every field is made of is listed in docs/malachite.md.
"""
