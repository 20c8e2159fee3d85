"""The objects that every node has, and what becomes of a node whose agent is gone."""
