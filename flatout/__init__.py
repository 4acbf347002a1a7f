"""flatout: exact, planned, flat-out fine-tuning of transformers models. Importing it does nothing."""

__version__ = "0.1.0"
