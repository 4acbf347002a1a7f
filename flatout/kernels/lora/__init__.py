"""Gradients that pass through LoRA's B: of x A.T, and of B itself, for layers of the same input.

reference.py is the definition and runs everywhere. triton.py is its equivalent in 16 bits on Hopper GPUs, which reads
each output's gradient once instead of twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from flatout.kernels.lora import reference
from flatout.kernels.lora.reference import MAX_RANK
from flatout.kernels.operators import define_operator


def uses_kernel(ranks: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether adapters of these ranks and this compute dtype have the one-pass kernel on this device.

    Its tiles fill the shared memory of Hopper GPUs, which are the ones it is measured on.
    """
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and max(ranks) <= MAX_RANK
        and torch.cuda.get_device_capability(device)[0] == 9
        and find_spec("triton") is not None
    )


def adapter_gradients(
    grads: Sequence[Tensor], low: Tensor, wides: Sequence[Tensor], scaling: float, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient of `low` (T, sum of r_i), and those of the B_i (N_i, r_i) times `scaling`, in `dtype`.

    See `reference.adapter_gradients`. Opaque to torch.compile, not differentiable, traceable after `register_ops`. The
    gradients of the B_i are views of one tensor.
    """
    low_grad, flat = torch.ops.flatout.adapter_gradients(list(grads), low, list(wides), scaling, dtype)
    parts = flat.split([wide.numel() for wide in wides])
    return low_grad, [part.view(wide.shape) for part, wide in zip(parts, wides, strict=True)]


@cache
def register_ops() -> None:
    """Register torch.ops.flatout.adapter_gradients; call before the first use of `adapter_gradients`."""
    schema = "(Tensor[] grads, Tensor low, Tensor[] wides, float scaling, ScalarType dtype) -> (Tensor, Tensor)"
    define_operator("flatout::adapter_gradients", schema, _gradients, _empty)


def _gradients(
    grads: list[Tensor], low: Tensor, wides: list[Tensor], scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if uses_kernel([wide.shape[1] for wide in wides], low.dtype, low.device):
        # machines without a GPU have no Triton
        from flatout.kernels.lora import triton

        num_processors = torch.cuda.get_device_properties(low.device).multi_processor_count
        return triton.adapter_gradients(grads, low, wides, scaling, dtype, num_processors=num_processors)
    low_grad, wide_grads = reference.adapter_gradients(grads, low, wides, scaling, dtype)
    return low_grad, torch.cat([grad.flatten() for grad in wide_grads])


def _empty(
    grads: list[Tensor], low: Tensor, wides: list[Tensor], scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return low.new_empty(low.shape), low.new_empty(sum(wide.numel() for wide in wides), dtype=dtype)
