"""Cross-entropy of an output head: `token_loss` by row tiles; reference.py is the truth."""

from flatout.kernels.cross_entropy.reference import head_logits
from flatout.kernels.cross_entropy.tiled import DEFAULT_TILE_ROWS, token_loss

__all__ = ["DEFAULT_TILE_ROWS", "head_logits", "token_loss"]
