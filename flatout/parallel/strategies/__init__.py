"""Strategies for distributing state and gradients over ranks, one per file."""
