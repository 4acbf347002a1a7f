"""LoRA on 16-bit weights with an exact forward pass and float8 input gradients (`base.backward: fp8`)."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from flatout.errors import Fix, ResourceError, UsageError
from flatout.kernels.fp8_matmul import MULTIPLE, fp8_problem
from flatout.models.blocks import decoder_layers, replace_module
from flatout.models.experts.block import experts_modules
from flatout.models.frozen.frozen_linear import Fp8BackwardLinear
from flatout.models.lora.saved import SavedModule


def convert_backward_to_float8(model: PreTrainedModel) -> str:
    """Replace the decoder's frozen linear layers by `Fp8BackwardLinear`; return a line for the console.

    Call it once adapters are added, and before layers are fused. These stay as they are: the head, modules that are
    trained in full, layers narrower than 16 (gates of experts), and fused experts. On the CPU the products are the
    reference's. Raises ResourceError if the GPU or the width of another layer does not support float8 products, and
    UsageError if no layer is replaced.
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
