"""The run: planning, setup, loop, step, checkpoints."""
