"""The fair benchmark: named rows, the same tokens for every trainer, a fresh process a run, one table."""
