"""Optimizers, learning-rate schedules, and ways to run an update."""
