"""Compiled layers, CUDA graphs and recomputation."""
