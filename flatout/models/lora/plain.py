"""Plain models over the base weights of a model with an adapter, and what PEFT makes of an adapter on one."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flatout.errors import first_line
from flatout.models.blocks import replace_module
from flatout.models.load.quantized import empty_model
from flatout.models.lora.adapter_file import OF_BASE, PREFIX
from flatout.models.lora.layer import adapted_modules

# the name under which PEFT loads an adapter
ADAPTER_NAME = "default"
# what PEFT raises for names that it cannot match, convert or load
_READING_ERRORS = (ValueError, RuntimeError, KeyError, TypeError, AttributeError)
# names that PEFT takes for matrices of fused experts wherever they stand, in mixture-of-experts models
EXPERT_NAME = re.compile(r"\.(gate_proj|up_proj|down_proj|gate|w[123])$")


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
        source: Tensor = live[name].detach()
        if isinstance(tensor, nn.Parameter):
            # tied weights stay tied
            source = borrowed.setdefault(id(live[name]), nn.Parameter(source, requires_grad=False))
        replace_module(plain, name, source)
    return True


class Misread(NamedTuple):
    """The layers that are adapted in only one of PEFT and flatout, all if PEFT fails; `reason` says why it does."""

    layers: set[str]
    reason: str = ""


def misread_layers(
    model: PreTrainedModel, content: Mapping[str, Any], state: Mapping[str, Tensor], saved: Collection[str]
) -> Misread:
    """Return the layers that are adapted here but not by PEFT, or by PEFT but not here.

    `content` is an adapter_config.json, `state` an adapter's tensors by PEFT's names, of which `saved` are no LoRA
    layers'. PEFT reads them into a copy of the model on the meta device, so values are not compared.
    """
    import peft

    def layers(names: Iterable[str]) -> set[str]:
        names = {name if name in saved else name.partition(".lora_")[0].replace(".base_layer", "") for name in names}
        return {name.removeprefix(PREFIX) for name in names}

    try:
        # PEFT warns about what is checked here: missing keys, tied heads
        with warnings.catch_warnings(action="ignore"):
            # it writes into the patterns that it gets
            settings = peft.LoraConfig(**copy.deepcopy(dict(content)))
            wrapped = peft.PeftModel(plain_copy(model), settings, low_cpu_mem_usage=True)
            tensors = {name: torch.empty(tensor.shape, device="meta") for name, tensor in state.items()}
            loaded = peft.set_peft_model_state_dict(wrapped, tensors, low_cpu_mem_usage=True)
    except _READING_ERRORS as error:
        return Misread(layers(state), f" ({first_line(error).partition('. ')[0]})")
    missing = {name.replace(f".{ADAPTER_NAME}", "") for name in loaded.missing_keys}
    read = peft_state(wrapped)
    same = {name for name in read if name in state and read[name].shape == state[name].shape and name not in missing}
    return Misread(layers((read.keys() | state.keys()) - same))


def peft_state(wrapped: Any) -> dict[str, Tensor]:
    """Return a PEFT model's adapter tensors, by the names under which PEFT would save them."""
    import peft

    state = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    # PEFT includes the base weight of an adapted head
    return {name: tensor for name, tensor in state.items() if not name.endswith(OF_BASE)}
