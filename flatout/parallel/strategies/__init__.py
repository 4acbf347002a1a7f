"""Strategies for distributing state and gradients over ranks, one per file.

Their table is `STRATEGIES` in `flatout/config/parallel.py`.
"""
