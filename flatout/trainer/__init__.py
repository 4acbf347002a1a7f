"""The run: decisions, setup, loop, step, checkpoints."""
