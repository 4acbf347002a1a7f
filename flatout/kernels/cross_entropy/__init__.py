"""Cross-entropy of an output head: `token_loss` by row tiles; reference.py has the reference."""

from flatout.kernels.cross_entropy.reference import product_loss
from flatout.kernels.cross_entropy.tiled import DEFAULT_TILE_ROWS, ROWS_MULTIPLE, is_fused, token_loss

__all__ = ["DEFAULT_TILE_ROWS", "ROWS_MULTIPLE", "is_fused", "product_loss", "token_loss"]
