"""Plan every step from sample lengths: which samples go to which rank and micro-batch, and what fits in memory."""
