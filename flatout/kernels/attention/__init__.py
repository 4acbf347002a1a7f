"""Packed causal attention: varlen (CUDA), sdpa and plain (document by document); reference.py is the truth."""

from flatout.kernels.attention.documents import plain_attention, sdpa_attention
from flatout.kernels.attention.reference import packed_attention
from flatout.kernels.attention.varlen import make_varlen_attention, varlen_problem

__all__ = ["make_varlen_attention", "packed_attention", "plain_attention", "sdpa_attention", "varlen_problem"]
