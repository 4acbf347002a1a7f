"""Per-document frequencies for rotary embeddings whose frequencies depend on the length of the input.

transformers takes that length from the largest position of a whole forward pass, so one long document would affect
all others in its micro-batch, and dynamic NTK would keep the longest length so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.models.blocks import replace_module, replaced_modules

Rotated = Tensor | tuple[Tensor, ...]
"""Cosines and sines (..., T, size), or one complex tensor."""


class DocumentRope(nn.Module):
    """Wraps a transformers rotary embedding and evaluates it as if each document were alone.

    Two kinds depend on the length: `longrope` (LongRoPE, arXiv:2402.13753) has one set of frequencies up to a limit
    and another beyond it; `dynamic` (dynamic NTK) has different ones for every length beyond its limit.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self.limits = _limits(rotary)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Rotated:
        """Rotate: `x` gives dtype and device; `position_ids` (..., T) restart at 0 in each document."""

        def rotate(position_ids: Tensor) -> Rotated:
            return self.rotary(x, position_ids, *([] if layer_type is None else [layer_type]))

        kind, limit = self.limits.get(layer_type, ("default", 0))
        if kind == "default":
            return rotate(position_ids)
        if kind == "dynamic":
            # a short input resets the longest length that it keeps
            rotate(position_ids[..., :1])
        short = rotate(position_ids.clamp(max=limit - 1))
        # for text, several axes of positions are identical
        positions = position_ids.reshape(-1, *position_ids.shape[-2:])[0]
        if kind == "longrope":
            # the length of each token's document, on the device: int64 (..., T)
            num_tokens = positions.shape[-1]
            rows = torch.arange(num_tokens, device=positions.device).expand_as(positions)
            starts = torch.where(positions == 0, rows, num_tokens)
            # the first start at or after each token; shifted by one, the first start after it
            at_or_after = starts.flip(-1).cummin(-1).values.flip(-1)
            ends = torch.cat([at_or_after[..., 1:], torch.full_like(rows[..., :1], num_tokens)], dim=-1)
            lengths = ends - (rows - positions)
            # if no document exceeds the limit, these equal the short frequencies
            is_long = (lengths > limit)[..., None]
            return _map(lambda long, short_: torch.where(is_long, long, short_), rotate(position_ids), short)
        # this waits for the device
        for row, row_positions in enumerate(positions):
            begins = row_positions.eq(0).nonzero().flatten().tolist()
            for start, end in zip(begins, [*begins[1:], len(row_positions)], strict=True):
                if end - start > limit:
                    rotate(position_ids[..., :1])
                    part = rotate(position_ids[..., row : row + 1, start:end])
                    _map(partial(_replace, slice(row, row + 1), slice(start, end)), short, part)
        return short


def scale_by_document(model: PreTrainedModel) -> str | None:
    """Replace every rotary embedding that depends on its input's length by a `DocumentRope`.

    Returns a line for the console, or None if the model has no such embedding.
    """
    ropes = {module: DocumentRope(module) for module in model.modules() if _limits(module)}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in ropes:
            replace_module(model, name, ropes[module])
    described = sorted({f"{kind} beyond {limit}" for rope in ropes.values() for kind, limit in rope.limits.values()})
    return f"rope {', '.join(described)} tokens: chosen per document by its length" if ropes else None


def length_limits(model: nn.Module) -> set[int]:
    """Return the lengths, in tokens, beyond which rotary embeddings change their frequencies."""
    return {limit for module in model.modules() for _, limit in _limits(module).values()}


@contextmanager
def plain_rope(model: PreTrainedModel) -> Iterator[None]:
    """Use transformers' own rotary embeddings within this context."""
    named = list(model.named_modules(remove_duplicate=False))
    with replaced_modules(model, {name: module.rotary for name, module in named if isinstance(module, DocumentRope)}):
        yield


def _limits(rotary: nn.Module) -> dict[str | None, tuple[str, int]]:
    """Return kind and limit in tokens of length-dependent embeddings, by layer type (None: one for all layers)."""
    # transformers' rotary embeddings have no common base class
    embedding: Any = rotary
    kinds = getattr(embedding, "rope_type", None)
    limits: dict[str | None, tuple[str, int]] = {}
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind == "longrope":
            parameters = embedding.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            limits[layer_type] = (kind, int(parameters["original_max_position_embeddings"]))
        elif isinstance(kind, str) and "dynamic" in kind:
            limits[layer_type] = ("dynamic", int(embedding.original_max_seq_len))
    return limits


def _replace(rows: slice, columns: slice, target: Tensor, part: Tensor) -> Tensor:
    return target[..., rows, columns, :].copy_(part)


def _map(function: Callable[..., Tensor], first: Rotated, second: Rotated) -> Rotated:
    if isinstance(first, Tensor):
        assert isinstance(second, Tensor)
        return function(first, second)
    return tuple(function(left, right) for left, right in zip(first, second, strict=True))
