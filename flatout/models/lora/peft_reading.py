"""How PEFT reads an adapter: which layers it adapts, with which tensors and scale, and the resulting logits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.models.load.quantized import empty_model

PREFIX = "base_model.model."
_ADAPTER = "default"
# what PEFT raises for names that it cannot match, convert or load
_READING_ERRORS = (ValueError, RuntimeError, KeyError, TypeError, AttributeError)
_NUM_TOKENS = 16


def misread_layers(model: PreTrainedModel, content: Mapping[str, Any], state: Mapping[str, Tensor]) -> set[str]:
    """Return the layers that are adapted here but not by PEFT, or by PEFT but not here.

    `content` is an adapter_config.json, `state` an adapter's tensors by PEFT's names. PEFT reads them into a copy of
    the model on the meta device, so values are not compared. Returns all layers if PEFT fails.
    """
    trained = _layers(state)
    try:
        # PEFT warns about what is checked here: missing keys, tied heads
        with warnings.catch_warnings(action="ignore"):
            wrapped = peft.PeftModel(plain_copy(model), peft.LoraConfig(**content), low_cpu_mem_usage=True)
            tensors = {name: torch.empty(tensor.shape, device="meta") for name, tensor in state.items()}
            loaded = peft.set_peft_model_state_dict(wrapped, tensors, low_cpu_mem_usage=True)
    except _READING_ERRORS:
        return trained
    missing = {name.replace(f".{_ADAPTER}", "") for name in loaded.missing_keys}
    read = peft_state(wrapped)
    same = {name for name in read if name in state and read[name].shape == state[name].shape and name not in missing}
    return _layers(name for name in read.keys() | state.keys() if name not in same)


def read_by_peft(plain: PreTrainedModel, folder: Path) -> peft.PeftModel:
    """Load the adapter in `folder` onto a plain model by `peft.PeftModel.from_pretrained`."""
    without_memory = next(plain.parameters()).is_meta
    with warnings.catch_warnings(action="ignore"):
        wrapped = peft.PeftModel.from_pretrained(
            plain, str(folder), adapter_name=_ADAPTER, low_cpu_mem_usage=without_memory
        )
    return wrapped.eval()


def peft_version() -> str:
    """Return the installed PEFT's version."""
    return str(peft.__version__)


def peft_state(wrapped: peft.PeftModel) -> dict[str, Tensor]:
    """Return a PEFT model's adapter tensors, by the names under which PEFT would save them."""
    state = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    # PEFT includes the base weight of an adapted head
    return {name: tensor for name, tensor in state.items() if ".base_layer." not in name}


def peft_scalings(wrapped: peft.PeftModel) -> set[float]:
    """Return the factors by which PEFT multiplies B A x."""
    return {module.scaling[_ADAPTER] for module in wrapped.modules() if hasattr(module, "lora_A")}


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Build transformers' own model of this shape on the meta device, in eval mode, without adapters."""
    options = {"dtype": model.dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
    return empty_model(copy.deepcopy(model.config), options).eval()


def borrow_weights(plain: PreTrainedModel, live: Mapping[str, Tensor]) -> bool:
    """Make a model on the meta device use these parameters and buffers in place.

    Returns False and changes nothing unless all of them are present, unsharded, on one device, and either in the
    expected dtype or in floating point of 16 bits or more; quantized and sharded weights are not.
    """
    wanted = [*plain.named_parameters(remove_duplicate=False), *plain.named_buffers(remove_duplicate=False)]
    for name, tensor in wanted:
        own = live.get(name)
        if own is None or hasattr(own, "to_local") or own.is_meta or own.shape != tensor.shape:
            return False
        if own.dtype != tensor.dtype and not (own.is_floating_point() and own.element_size() > 1):
            return False
    if len({live[name].device for name, _ in wanted}) != 1:
        return False
    borrowed: dict[int, nn.Parameter] = {}
    for name, tensor in wanted:
        path, _, leaf = name.rpartition(".")
        source: Tensor = live[name].detach()
        if isinstance(tensor, nn.Parameter):
            # tied weights stay tied
            source = borrowed.setdefault(id(live[name]), nn.Parameter(source, requires_grad=False))
        setattr(plain.get_submodule(path), leaf, source)
    return True


@torch.no_grad()
def logits_of_short_text(model: Any) -> Tensor:
    """Return the logits (16, V), at least fp32, of a transformers or PEFT model for sixteen fixed tokens."""
    embedding = model.get_input_embeddings().weight
    token_ids = (torch.arange(_NUM_TOKENS, device=embedding.device) * 7919 + 3) % len(embedding)
    logits: Tensor = model(input_ids=token_ids[None], use_cache=False).logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _layers(names: Iterable[str]) -> set[str]:
    """Return the module names in an adapter's tensor names."""
    layers = (name.removeprefix(PREFIX).partition(".lora_")[0] for name in names)
    return {name.replace(".base_layer", "") for name in layers}
