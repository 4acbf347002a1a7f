"""What PEFT would make of an adapter, without reading any values."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flatout.errors import first_line
from flatout.models.lora.adapter_file import OF_BASE, PREFIX
from flatout.models.lora.plain import plain_copy

# the name under which PEFT loads an adapter
ADAPTER_NAME = "default"
# what PEFT raises for names that it cannot match, convert or load
_READING_ERRORS = (ValueError, RuntimeError, KeyError, TypeError, AttributeError)
# names that PEFT takes for matrices of fused experts wherever they stand, in mixture-of-experts models
EXPERT_NAME = re.compile(r"\.(gate_proj|up_proj|down_proj|gate|w[123])$")


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
