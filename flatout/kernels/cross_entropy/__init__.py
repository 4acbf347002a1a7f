"""Cross-entropy of an output head: `token_loss` by row tiles; reference.py is the truth."""

from flatout.kernels.cross_entropy.reference import head_logits
from flatout.kernels.cross_entropy.tiled import DEFAULT_TILE_ROWS, ROWS_MULTIPLE, is_fused, token_loss

__all__ = ["DEFAULT_TILE_ROWS", "ROWS_MULTIPLE", "head_logits", "is_fused", "token_loss"]
