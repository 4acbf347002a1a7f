"""Packed causal attention: varlen, cudnn, fa3, fa4 (CUDA), sdpa and plain (by document)."""
