"""Parallel training: ranks, process groups, sharding strategies and fault tolerance.

The table of strategies is `STRATEGIES` in `flatout/config/parallel.py`.
"""
