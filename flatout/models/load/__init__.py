"""Load a model from a hub id or folder."""
