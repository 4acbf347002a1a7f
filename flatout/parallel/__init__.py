"""Parallel training: ranks, process groups, sharding strategies and fault tolerance."""
