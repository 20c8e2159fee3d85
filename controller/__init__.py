"""Cluster controllers: configuration of nodes, and the lifecycle of nodes whose agent is missing.
Each controller computes its actions with a pure function; effects are at its edge. One of several replicas leads.
"""
