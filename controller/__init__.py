"""The cluster's half of Dioptase: which node gets which configuration, and what becomes of a node whose agent is gone.

Every controller decides by a pure function of what is known and the time; effects are at its edge. One process, and of several
replicas one leads.
"""
