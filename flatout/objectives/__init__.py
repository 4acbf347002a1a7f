"""Losses: what a loss declares of itself, and how its sums follow from log-probabilities.

The table of kinds is `OBJECTIVES` in `flatout/config/objective.py`.
"""
