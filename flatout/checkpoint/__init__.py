"""Checkpoints on disk: written by every rank, read slice by slice, verified by hashes."""
