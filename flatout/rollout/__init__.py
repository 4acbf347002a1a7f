"""Answers of a model: how tokens are sampled, in this process, over the weights that are there."""
