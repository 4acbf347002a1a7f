"""Full fine-tuning with fp8 matrix products: Fp8Linear or torchao's Float8Linear, grouped products for experts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.config.model import CompileMode
from flatout.errors import ResourceError, UsageError
from flatout.kernels.fp8 import MULTIPLE, has_fp8
from flatout.models.bases.fp8_linear import Fp8Linear
from flatout.models.bases.frozen_experts import CAST_TO_FP8
from flatout.models.blocks import decoder_layers
from flatout.models.experts.block import MATMUL, experts_modules, is_grouped

# names of the linear layers that choose experts
_ROUTERS = ("gate", "router")


def convert_to_float8(
    model: PreTrainedModel,
    compute: Literal["fp8", "fp8_rowwise"],
    *,
    compile_mode: CompileMode,
    shards: bool,
) -> str:
    """Convert the layers of `fitting_linears` and the experts of `experts_to_float8`; return a line for the console.

    Scales are computed each time (arXiv:2209.05433). fp8 is torchao's: all three products, one scale per tensor (e4m3;
    output gradients e5m2), and if the run `shards` state, weights are gathered in fp8. fp8_rowwise is `Fp8Linear`:
    output and input gradient, one scale per row (e4m3), weight gradients in the compute dtype, in which weights are
    also gathered. Experts compute as fp8_rowwise with both. Weights keep their dtype. Call it before compiling the
    layers: uncompiled, the casts cost more than fp8 gains.
    Raises UsageError for fp8 without torchao, with compile off or if no layer fits, ResourceError on a GPU without fp8.
    """
    if compile_mode == "off":
        raise UsageError(
            f"full.compute: {compute} gains nothing without compilation; got compile: off, use auto or "
            "full.compute: model"
        )
    if not has_fp8(model.device):
        raise ResourceError(
            f"full.compute: {compute} needs a CUDA GPU of compute capability 8.9 or newer; use full.compute: model"
        )
    fitting, num_others = fitting_linears(model)
    num_experts = experts_to_float8(model)
    if not fitting and not num_experts:
        raise UsageError(
            f"full.compute: {compute} needs linear layers or experts with widths in multiples of {MULTIPLE} between "
            "the first and the last decoder layer; this model has none, use full.compute: model"
        )
    if is_rowwise := compute == "fp8_rowwise":
        for linear in fitting:
            linear.__class__ = Fp8Linear
    else:
        _convert_by_torchao(model, fitting, shards)
    gathered = ", gathered in fp8" if shards and not is_rowwise else ""
    num_layers = len(experts_modules(model))
    experts = f"experts of {num_experts} of {num_layers} layers do with one per row; " if num_layers else ""
    return (
        f"{len(fitting)} linear layers compute in fp8, one scale per {'row' if is_rowwise else 'tensor'}{gathered}; "
        f"{experts}"
        f"{num_others} do not (the first and last decoder layer, routers, other widths)"
    )


def _convert_by_torchao(model: PreTrainedModel, fitting: Collection[nn.Linear], shards: bool) -> None:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UsageError(
            "full.compute: fp8 needs torchao; install flatout[gpu], or use full.compute: fp8_rowwise or model"
        ) from error
    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: module in fitting,
        config=Float8LinearConfig(enable_fsdp_float8_all_gather=shards),
    )


def compute_scales_after_updates(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compute the scales of all weights that FSDP2 gathers in fp8 by one reduction, after each update."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    optimizer.register_step_post_hook(lambda *_: precompute_float8_dynamic_scale_for_fsdp(model))


def fitting_linears(model: PreTrainedModel) -> tuple[set[nn.Linear], int]:
    """Return the linear layers that compute in fp8, and the number of the decoder's others.

    They are the decoder's plain ones with valid sizes, except routers and all in the first and the last layer, which
    are the most sensitive to rounding. The head is not in a decoder layer.
    """
    layers, inner = decoder_layers(model), _inner_modules(model)
    linears = {m: path for layer in layers for path, m in layer.named_modules() if type(m) is nn.Linear}
    fitting = {
        linear
        for linear, path in linears.items()
        if linear in inner
        and path.rpartition(".")[2] not in _ROUTERS
        and linear.in_features % MULTIPLE == linear.out_features % MULTIPLE == 0
    }
    return fitting, len(linears) - len(fitting)


def experts_to_float8(model: PreTrainedModel) -> int:
    """Let forward and input gradient of experts be fp8 products, cast from their weights; return in how many layers.

    They are those of grouped products with valid sizes, except in the first and the last decoder layer.
    """
    fitting = [
        experts
        for experts in experts_modules(model).values()
        if experts in _inner_modules(model)
        and is_grouped(experts)
        and all(size % MULTIPLE == 0 for own in experts.parameters() if own.dim() == 3 for size in own.shape[1:])
    ]
    for experts in fitting:
        setattr(experts, MATMUL, CAST_TO_FP8)
    return len(fitting)


def _inner_modules(model: PreTrainedModel) -> set[nn.Module]:
    """Return all modules between the first and the last decoder layer, which are the most sensitive to rounding."""
    return {module for layer in decoder_layers(model)[1:-1] for module in layer.modules()}
