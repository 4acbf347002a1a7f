"""The model that a sampler reads, and how its passes are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flatout.models.attention import choose_attention, register, registered_name
from flatout.models.blocks import attention_of_parts
from flatout.models.model_with_loss import next_logits
from flatout.models.packed import PackedBatch
from flatout.models.pictures import PicturePacker, read_with_own_attention

# mean difference of log-probabilities with a cache to those without: both add the same terms in another order
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
FLOAT8_TOLERANCE = 0.3
# of prompts in one pass
_MAX_PASS_TOKENS = 8192
Logits = Callable[[PackedBatch], Tensor]
"""Computes the logits (L, V) after a batch's label rows, in fp32 (fp64 in fp64)."""


@dataclass(frozen=True, slots=True)
class SamplerModel:
    """A model in this process, whose weights may change between calls of a sampler."""

    pretrained: PreTrainedModel
    logits: Logits
    device: torch.device
    tolerance: float
    """A cache is exact if log-probabilities with it are on average so close to those without."""
    max_pass_tokens: int
    is_padded: bool
    """Whether passes without a cache are padded."""
    packed_context: Callable[[], AbstractContextManager[object]] | None
    """In it, the model computes packed documents; None if it cannot."""
    prefers_own_cache: bool = False
    """Whether a single answer is sampled by transformers' own attention and cache."""
    in_lockstep: bool = False
    """Whether other ranks take part in every pass."""
    broadcast_tokens: Callable[[Tensor], Tensor] = lambda tokens: tokens
    """Returns the first rank's tokens."""
    all_reduce_min: Callable[[int], int] = lambda number: number
    """Returns the smallest number of any rank."""
    log: Callable[[str], None] = lambda line: None
    pictures: PicturePacker | None = None
    """Adds those of prompts to batches; None if no prompt has any."""


def make_sampler_model(model: PreTrainedModel, log: Callable[[str], None] = lambda line: None) -> SamplerModel:
    """Return a model from `load_for_inference`, on one device or several, as a sampler reads it."""
    device = model.get_input_embeddings().weight.device
    devices = getattr(model, "hf_device_map", None) or {"": device}
    if device.type == "meta":
        # offloaded embeddings are copied to the first GPU of the device map
        device = torch.device(next(used for used in devices.values() if used not in ("cpu", "disk")))
    return SamplerModel(
        pretrained=model,
        logits=lambda batch: next_logits(model, batch).to(device),
        device=device,
        tolerance=TOLERANCES[model.dtype],
        max_pass_tokens=_MAX_PASS_TOKENS,
        is_padded=True,
        packed_context=partial(_packed_attention, model) if len(set(devices.values())) == 1 else None,
        prefers_own_cache=True,
        log=log,
    )


@contextmanager
def _packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model with transformers' attention compute packed documents. Raises ValueError if it cannot."""
    config, before = model.config.get_text_config(), attention_of_parts(model)
    choice = choose_attention("auto", config, device=model.device, dtype=model.dtype)
    register(choice.implementation)
    name = registered_name(choice.implementation)
    try:
        model.set_attn_implementation(name)
        if config._attn_implementation != name:
            raise ValueError("its attention does not go through transformers' attention interface")
        if config is not model.config:
            read_with_own_attention(model, model.dtype)
        yield
    finally:
        model.set_attn_implementation(before)
