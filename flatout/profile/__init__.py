"""Profile training steps."""
