"""Full fine-tuning with fp8 matrix products: replaces the decoder's linear layers by torchao's Float8Linear."""

from __future__ import annotations

from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from flatout.errors import ResourceError, UsageError
from flatout.kernels.fp8 import MULTIPLE, has_fp8
from flatout.models.blocks import decoder_layers


def convert_to_float8(model: PreTrainedModel, *, compile_mode: Literal["auto", "off"]) -> str:
    """Replace the decoder's linear layers by torchao's Float8Linear; return a line for the console.

    All three products are in fp8 (e4m3; output gradients e5m2) with one scale per tensor, computed each time
    (arXiv:2209.05433): the fastest recipe on H100-class GPUs. Weights keep their dtype and identity. The head, and
    layers whose widths are not multiples of 16, are not replaced. Call it before compiling the layers: uncompiled, the
    casts cost more than fp8 gains. Raises UsageError without torchao, with compile off or if no layer fits,
    ResourceError on a GPU without fp8.
    """
    if compile_mode == "off":
        raise UsageError(
            "full.compute: fp8 gains nothing without compilation; got compile: off, use auto or full.compute: model"
        )
    if model.device.type != "cuda" or not has_fp8(model.device):
        raise ResourceError(
            "full.compute: fp8 needs a CUDA GPU of compute capability 8.9 or newer; use full.compute: model"
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UsageError("full.compute: fp8 needs torchao; install flatout[gpu] or use full.compute: model") from error
    fitting, num_others = fitting_linears(model)
    if not fitting:
        raise UsageError(
            f"full.compute: fp8 needs linear layers with widths in multiples of {MULTIPLE}; this model has none, "
            "use full.compute: model"
        )
    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: module in fitting,
        config=Float8LinearConfig.from_recipe_name("tensorwise"),
    )
    left = f"; {num_others} of other widths do not" if num_others else ""
    return f"{len(fitting)} linear layers compute in fp8, one scale per tensor{left}"


def fitting_linears(model: PreTrainedModel) -> tuple[set[nn.Linear], int]:
    """Return the decoder's plain linear layers with valid sizes for fp8 products, and the number of others."""
    linears = [m for layer in decoder_layers(model) for m in layer.modules() if type(m) is nn.Linear]
    fitting = {m for m in linears if m.in_features % MULTIPLE == 0 and m.out_features % MULTIPLE == 0}
    return fitting, len(linears) - len(fitting)
