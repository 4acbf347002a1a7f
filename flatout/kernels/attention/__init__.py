"""Packed causal attention: varlen, cudnn, fa4 (CUDA), sdpa and plain (by document)."""
