"""transformers models, unchanged: loading, attention, adapters, loss head, self-test, export."""
