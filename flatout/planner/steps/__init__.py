"""Assign samples to steps, ranks and micro-batches."""
