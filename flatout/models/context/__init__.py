"""Context parallelism: ranks share the tokens of a micro-batch, and exchange keys and values in attention."""
