"""The truth for `flatout verify`: transformers' own forward pass and PEFT's own LoRA, padded rows, none of our step."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.config.schema import Config
from flatout.models.bases import FROZEN_LINEARS
from flatout.models.blocks import replace_module
from flatout.models.export import load_adapter, save_adapter
from flatout.models.load import load_for_inference, load_model, resolve_precision
from flatout.models.lora import add_lora, freeze, lora_layers, trainable_parameters

# how far B of a fresh adapter is moved from zero, where A would have no gradient
WAKE_SCALE = 0.02
_PEFT_PREFIX = "base_model.model."
_OUR_NAMES = {
    ".lora_A.default.weight": ".lora_a",
    ".lora_B.default.weight": ".lora_b",
    ".lora_magnitude_vector.default.weight": ".magnitude",
}

Sample = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A plain model and its trained parameters under our names."""

    model: nn.Module
    named: dict[str, nn.Parameter]
    autocast: torch.dtype | None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def plain_model(config: Config, device: torch.device, adapter: Path) -> PlainModel:
    """The run's model as transformers and PEFT have it, in eval mode (no dropout), its trained parameters awake.

    With method lora the adapter is read from the folder `adapter` (PEFT's format), or written there first: the run's
    start with every B that is all zeros moved a little. Quantised layers become the dense weights they stand for.
    Raises as `load_model`.
    """
    model = _own_attention(_dense_model(config, device)).eval()
    dtype = resolve_precision(config.model.precision, device)
    if config.method == "full":
        model.requires_grad_(True)
        if config.freeze:
            freeze(model, config.freeze)
        return PlainModel(model, trainable_parameters(model), dtype if dtype != model.dtype else None)
    if not adapter.exists():
        _write_adapter(model, config, adapter)
    from peft import PeftModel

    with warnings.catch_warnings():
        # PEFT reads a name that transformers is about to drop
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = PeftModel.from_pretrained(model, str(adapter), is_trainable=True).eval()
    named = {_our_name(name): parameter for name, parameter in trainable_parameters(wrapped).items()}
    return PlainModel(wrapped, named, None)


def plain_step(plain: PlainModel, samples: Sequence[Sample], *, max_tokens: int = 0) -> float:
    """Loss of one step and, in the parameters, its gradient: summed cross-entropy over the count of label tokens.

    One sample at a time, or right-padded batches of at most `max_tokens` tokens, padding counted. Raises ValueError
    without label tokens.
    """
    num_labels = sum(int(trained[1:].sum()) for _, trained in samples)
    if not num_labels:
        raise ValueError("the step has no label token")
    plain.model.zero_grad(set_to_none=True)
    total = 0.0
    for rows in _batches(samples, max_tokens):
        ids, mask, labels = (tensor.to(plain.device) for tensor in _padded(rows))
        lower = plain.autocast
        with torch.autocast(plain.device.type, dtype=lower) if lower else nullcontext():
            logits = plain.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        loss_sum = F.cross_entropy(wide, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
        (loss_sum / num_labels).backward()
        total += loss_sum.item()
    return total / num_labels


def _dense_model(config: Config, device: torch.device) -> PreTrainedModel:
    stored = config.base.storage if config.method == "lora" else "model"
    if config.model.init == "pretrained" and stored == "model":
        dtype = resolve_precision(config.model.precision, device)
        if config.method == "full":
            dtype = torch.promote_types(dtype, torch.float32)
        return load_for_inference(config.model.name, revision=config.model.revision, device=device, dtype=dtype)
    # random and quantised weights exist only as our loader makes them
    loaded = load_model(
        config.model, method=config.method, device=device, seed=config.seed, full=config.full, base=config.base
    )
    for name, module in list(loaded.model.named_modules()):
        if isinstance(module, FROZEN_LINEARS) and not isinstance(module, nn.Linear):
            replace_module(loaded.model, name, _dense_linear(module))
    return loaded.model


@torch.no_grad()
def _dense_linear(stored: Any) -> nn.Linear:
    weight, bias = stored.weight, stored.bias
    linear = nn.Linear(stored.in_features, stored.out_features, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=False)
    return linear


def _own_attention(model: PreTrainedModel) -> PreTrainedModel:
    """transformers' sdpa; its eager form where scores are soft-capped or the model has no sdpa."""
    text_config = model.config.get_text_config()
    try:
        capped = getattr(text_config, "attn_logit_softcapping", None)
        model.set_attn_implementation("eager" if capped else "sdpa")
    except ValueError:
        model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def _write_adapter(model: PreTrainedModel, config: Config, folder: Path) -> None:
    add_lora(model, config.lora, seed=config.seed)
    if config.lora.continue_from is not None:
        load_adapter(model, config.lora.continue_from)
    layers = lora_layers(model)
    for name, layer in layers.items():
        if not layer.lora_b.any():
            generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:12], 16))
            layer.lora_b.copy_(WAKE_SCALE * torch.randn(layer.lora_b.shape, generator=generator))
    save_adapter(model, folder, base_name=config.model.name, config=config.lora)
    for name, layer in layers.items():
        replace_module(model, name, layer.base)


def _our_name(peft_name: str) -> str:
    name = peft_name.removeprefix(_PEFT_PREFIX)
    for theirs, ours in _OUR_NAMES.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name


def _batches(samples: Sequence[Sample], max_tokens: int) -> Iterator[list[Sample]]:
    rows: list[Sample] = []
    for sample in samples:
        longest = max(len(ids) for ids, _ in (*rows, sample))
        if rows and longest * (len(rows) + 1) > max_tokens:
            yield rows
            rows = []
        rows.append(sample)
    yield rows


def _padded(rows: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded ids, attention mask and labels (-100 without loss), int64 (B, longest)."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, (tokens, trained) in enumerate(rows):
        values = torch.tensor(tokens.tolist())
        ids[row, : len(values)] = values
        mask[row, : len(values)] = 1
        labels[row, : len(values)] = torch.where(torch.tensor(trained.tolist()), values, -100)
    return ids, mask, labels
