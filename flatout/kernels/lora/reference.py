"""Gradients that pass through LoRA's B: the definition, in plain torch, on any device and in any dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# the widest adapter whose sums the kernel keeps in registers
MAX_RANK = 64


def adapter_gradients(
    grads: Sequence[Tensor], low: Tensor, wides: Sequence[Tensor], scaling: float, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient of `low` (T, sum of r_i), and those of the B_i (N_i, r_i) times `scaling`, in `dtype`.

    `grads` are the outputs' gradients dY_i (T, N_i), `low` the inputs x A_i.T side by side, `wides` the scaled B_i.
    """
    parts = [grad @ wide for grad, wide in zip(grads, wides, strict=True)]
    inputs = low.split([wide.shape[1] for wide in wides], dim=1)
    wide_grads = [(grad.t() @ part).to(dtype) * scaling for grad, part in zip(grads, inputs, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), wide_grads
