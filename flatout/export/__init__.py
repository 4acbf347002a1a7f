"""The way out of a run: to the hub, and to programs that serve models."""
