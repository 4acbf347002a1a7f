"""flatout: exact, planned, flat-out fine-tuning of transformers models. Importing it has no side effects."""

__version__ = "0.1.0"
