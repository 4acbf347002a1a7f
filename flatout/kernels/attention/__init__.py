"""Packed causal attention: varlen, cudnn, fa3, fa4 (CUDA), sdpa, plain (by document); reference.py is the reference."""

from flatout.kernels.attention.cudnn import cudnn_problem, make_cudnn_attention, prepare_cudnn_attention
from flatout.kernels.attention.documents import plain_attention, sdpa_attention
from flatout.kernels.attention.flash import FlashName, flash_disagreement, flash_problem, make_flash_attention
from flatout.kernels.attention.reference import packed_attention
from flatout.kernels.attention.varlen import make_varlen_attention, varlen_problem

__all__ = [
    "FlashName",
    "cudnn_problem",
    "flash_disagreement",
    "flash_problem",
    "make_cudnn_attention",
    "make_flash_attention",
    "make_varlen_attention",
    "packed_attention",
    "plain_attention",
    "prepare_cudnn_attention",
    "sdpa_attention",
    "varlen_problem",
]
