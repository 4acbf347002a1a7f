"""Plain models that use the base weights of a model with an adapter."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flatout.models.load.quantized import empty_model
from flatout.models.lora.layer import adapted_modules


def share_base(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a model without adapters that uses the base weights of `model` in place; None if not all can be shared."""
    twin = plain_copy(model, attention="sdpa")
    twin.generation_config = model.generation_config
    return twin if borrow_weights(twin, model) else None


def plain_copy(model: PreTrainedModel, *, attention: str = "eager") -> PreTrainedModel:
    """Build transformers' own model of this shape on the meta device, in eval mode, without adapters."""
    options = {"dtype": model.dtype, "attn_implementation": attention, "experts_implementation": "eager"}
    return empty_model(copy.deepcopy(model.config), options).eval()


def borrow_weights(plain: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Make a plain copy on the meta device use the base weights and buffers of `model` in place.

    Returns False and changes nothing unless all of them are present, unsharded, on one device, and either in the
    expected dtype or in floating point of 16 bits or more; quantized and sharded weights are not.
    """
    live = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    # adapters of experts are nested: from the inside
    for name in reversed(adapted_modules(model)):
        inner = f"{name}.base."
        live |= {f"{name}.{key.removeprefix(inner)}": tensor for key, tensor in live.items() if key.startswith(inner)}
    plain_tensors = [*plain.named_parameters(remove_duplicate=False), *plain.named_buffers(remove_duplicate=False)]
    for name, tensor in plain_tensors:
        base = live.get(name)
        if base is None or isinstance(base, DTensor) or base.is_meta or base.shape != tensor.shape:
            return False
        if base.dtype != tensor.dtype and not (base.is_floating_point() and base.element_size() > 1):
            return False
    if len({live[name].device for name, _ in plain_tensors}) != 1:
        return False
    borrowed: dict[int, nn.Parameter] = {}
    for name, tensor in plain_tensors:
        path, _, leaf = name.rpartition(".")
        source: Tensor = live[name].detach()
        if isinstance(tensor, nn.Parameter):
            # tied weights stay tied
            source = borrowed.setdefault(id(live[name]), nn.Parameter(source, requires_grad=False))
        setattr(plain.get_submodule(path), leaf, source)
    return True
