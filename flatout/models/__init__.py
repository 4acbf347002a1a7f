"""Unmodified transformers models: loading, attention, adapters, loss head, self-test, export."""
