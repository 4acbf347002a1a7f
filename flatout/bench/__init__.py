"""The fair benchmark: named rows, the same tokens for every system, fresh processes, one table."""
