"""Which samples, rank and micro-batch in every step: arithmetic on lengths."""
