"""QRM as its neighbours in a Katalyst cluster see it: as the plugin of whoever admits pods, and either side of the advisor.

What is translated is pure; sockets are asked for by agent/rpc.py alone, and only when one of these modules is imported.
"""
