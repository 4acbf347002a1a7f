"""`flatout doctor`: check what a run needs before it starts."""
