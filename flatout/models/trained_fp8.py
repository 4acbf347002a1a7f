"""fp8 products of 16-bit weights: in full fine-tuning, and for input gradients of frozen layers (`base.backward`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.config.model import CompileMode
from flatout.errors import Fix, ResourceError, UsageError, needs_extra
from flatout.kernels.fp8_matmul import MULTIPLE, fp8_problem, has_fp8, quantize_rows, scaled_product
from flatout.models.blocks import decoder_layers, replace_module
from flatout.models.experts.block import MATMUL, experts_modules, is_grouped
from flatout.models.frozen.frozen_experts import CAST_TO_FP8
from flatout.models.frozen.frozen_linear import Fp8BackwardLinear
from flatout.models.lora.saved import SavedModule

# names of the linear layers that choose experts
_ROUTERS = ("gate", "router")
_MODEL = Fix({"full.compute": "model"})


class _Fp8Product(torch.autograd.Function):
    """x W.T for x (..., K) and a trained W (N, K), both quantized by row (arXiv:2209.05433); returns (..., N).

    The scales of W's rows are folded into the output's gradient before that is quantized by row, so both products have
    the same bytes: dX = (dY * scale) @ bytes. They are made twice rather than kept, which costs less than their memory.
    dW = dY.T x is computed in x's dtype: its sum runs over tokens, so float8 would need scales per column, which take
    another pass over both, and transposed copies of both.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        quantized, scale = quantize_rows(weight)
        x_quantized, x_scale = quantize_rows(rows)
        ctx.save_for_backward(rows, weight)
        return scaled_product(x_quantized, quantized, x_scale, scale[:, 0], x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            quantized, scale = quantize_rows(weight)
            ones = torch.ones(quantized.shape[1], dtype=torch.float32, device=grad.device)
            grad_quantized, grad_scale = quantize_rows(grad * scale[:, 0].to(grad.dtype))
            x_grad = scaled_product(grad_quantized, quantized.t().contiguous(), grad_scale, ones, grad.dtype)
            x_grad = x_grad.view(*grads[0].shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            weight_grad = (grad.t() @ rows).to(weight.dtype)
        return x_grad, weight_grad


class TrainedFp8Linear(nn.Linear):
    """An nn.Linear that computes as `_Fp8Product`; under autocast, inputs are cast to its dtype.

    An existing layer becomes one by its `__class__`, so parameters and names stay.
    """

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        output: Tensor = _Fp8Product.apply(x, self.weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def convert_to_float8(
    model: PreTrainedModel,
    compute: Literal["fp8", "fp8_rowwise"],
    *,
    compile_mode: CompileMode,
    shards: bool,
) -> str:
    """Convert the layers of `fitting_linears` and the experts of `experts_to_float8`; return a line for the console.

    fp8 is torchao's: all three products, one scale per tensor (e4m3; output gradients e5m2), and if the run `shards`
    state, weights are gathered in fp8. fp8_rowwise is `TrainedFp8Linear`: output and input gradient, one scale per row
    (e4m3). Experts compute as fp8_rowwise with both. Weights keep their dtype. Call it before compiling the layers:
    uncompiled, the casts cost more than fp8 gains. Raises like `find_float8`, and UsageError for fp8 without torchao.
    """
    fitting, num_others, num_experts = find_float8(model, compute, compile_mode=compile_mode)
    if is_rowwise := compute == "fp8_rowwise":
        for linear in fitting:
            linear.__class__ = TrainedFp8Linear
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


def find_float8(
    model: PreTrainedModel, compute: Literal["fp8", "fp8_rowwise"], *, compile_mode: CompileMode, on_cpu: bool = False
) -> tuple[set[nn.Linear], int, int]:
    """Return what `fitting_linears` does, and how many experts `experts_to_float8` has converted.

    The model may be on the meta device. Raises UsageError with compile off or if no layer fits, ResourceError
    `on_cpu` and on a GPU without fp8.
    """
    if compile_mode == "off":
        raise UsageError(f"full.compute: {compute} gains nothing with compile=off", [Fix({"compile": "auto"}), _MODEL])
    device = torch.device("cpu") if on_cpu else model.device
    if device.type != "meta" and not has_fp8(device):
        raise ResourceError(f"full.compute: {compute} needs a CUDA GPU of compute capability 8.9 or newer", [_MODEL])
    (fitting, num_others), num_experts = fitting_linears(model), experts_to_float8(model)
    if not fitting and not num_experts:
        raise UsageError(
            f"full.compute: {compute} needs linear layers or experts with widths in multiples of {MULTIPLE} between "
            "the first and the last decoder layer; this model has none",
            [_MODEL],
        )
    return fitting, num_others, num_experts


def _convert_by_torchao(model: PreTrainedModel, fitting: Collection[nn.Linear], shards: bool) -> None:
    with needs_extra("full.compute: fp8", "gpu", Fix({"full.compute": "fp8_rowwise"}), _MODEL):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
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
        and all(size % MULTIPLE == 0 for stack in experts.parameters() if stack.dim() == 3 for size in stack.shape[1:])
    ]
    for experts in fitting:
        setattr(experts, MATMUL, CAST_TO_FP8)
    return len(fitting)


def _inner_modules(model: PreTrainedModel) -> set[nn.Module]:
    return {module for layer in decoder_layers(model)[1:-1] for module in layer.modules()}


def convert_backward_to_float8(model: PreTrainedModel) -> str:
    """Replace the decoder's frozen linear layers by `Fp8BackwardLinear`; return a line for the console.

    Call it after adapters are added and before layers are fused. The head, modules that are trained in full, layers
    narrower than 16 (gates of experts) and fused experts stay as they are. Raises ResourceError if the GPU or the width
    of another layer does not support float8 products, and UsageError if no layer is replaced.
    """
    converted: list[Fp8BackwardLinear] = []
    num_narrow = 0
    for layer in decoder_layers(model):
        saved = [module for module in layer.modules() if isinstance(module, SavedModule)]
        trained = {module for wrapper in saved for module in wrapper.modules()}
        for path, linear in list(layer.named_modules()):
            if type(linear) is not nn.Linear or linear in trained:
                continue
            if min(linear.weight.shape) < MULTIPLE:
                num_narrow += 1
                continue
            if problem := fp8_problem(linear.weight.device, *linear.weight.shape):
                raise ResourceError(f"base.backward: {problem}", [Fix({"base.backward": "same"})])
            converted.append(Fp8BackwardLinear(linear))
            replace_module(layer, path, converted[-1])
    if not converted:
        raise UsageError(
            f"base.backward: fp8 needs frozen linear layers of a width of {MULTIPLE} or more, which this decoder lacks",
            [Fix({"base.backward": "same"})],
        )
    num_bytes = sum(linear.transposed.nbytes + linear.column_scale.nbytes for linear in converted)
    line = (
        f"{len(converted)} linear layers compute input gradients in fp8; their copies take {num_bytes / 2**30:.2f} GiB"
    )
    if num_narrow:
        line += f"; {num_narrow} are too narrow and stay as they are"
    if num_experts := len(experts_modules(model)):
        line += f"; experts of {num_experts} layers stay in {str(model.dtype).removeprefix('torch.')} in both passes"
    return line
