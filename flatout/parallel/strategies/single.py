"""One process on one device: nothing to sum. The other strategies are tested against this one."""

from flatout.parallel.strategies.protocol import Strategy


class Single(Strategy):
    """Strategy's default methods."""
