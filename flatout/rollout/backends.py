"""Backends that continue several answers at once: in slots, by transformers' own cache, or from the start each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from flatout.data.pictures.read import decoded
from flatout.io.host_memory import available_host_bytes
from flatout.models.packed import PackedBatch, flatten_samples, padded_num_boundaries
from flatout.models.slot_cache import SlotCache
from flatout.planner.steps.packing import row_length
from flatout.rollout.sampler import NoRoomError, followed, pictures_of
from flatout.rollout.sampler_model import SamplerModel

Group = tuple[Sequence[int], int]
"""A prompt and how many answers to it begin."""


class DecodeBackend(Protocol):
    """Continues answers, which have consecutive places from 0 on. `mixes` whether new ones may join at any time."""

    mixes: bool

    def admit(self, groups: Sequence[Group]) -> Tensor:
        """Begin answers at the next free places; return the logits (prompts, V) after each prompt."""

    def step(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Return the logits (N, V) after the newest `tokens` int64 (N,) of all answers, at `positions` int64 (N,).

        `longest` bounds the tokens of an answer with its prompt.
        """

    def move(self, pairs: list[tuple[int, int]], num_answers: int) -> None:
        """Move answers (from, to) to places that have ended, so that the first `num_answers` places are in use."""


class Slots:
    """Packed passes, as in training, over a `SlotCache`; prompts are computed once for all of their answers."""

    mixes = True

    def __init__(self, model: SamplerModel, cache: SlotCache) -> None:
        self._model, self._cache, self._num_answers = model, cache, 0
        # steps that are recorded as CUDA graphs read these addresses
        self._rows = torch.arange(cache.num_slots + 1, device=model.device)
        self._shifts = torch.zeros_like(self._rows)

    def admit(self, groups: Sequence[Group]) -> Tensor:
        passes = in_passes([len(prompt) for prompt, _ in groups], self._model.max_pass_tokens)
        return torch.cat([self._fill(groups[part]) for part in passes])

    def _fill(self, groups: Sequence[Group]) -> Tensor:
        """Compute prompts in one pass, and copy the keys of each to the slots of its answers."""
        sources, targets, start, first = [], [], 0, self._num_answers
        for prompt, count in groups:
            places = np.arange(len(prompt))
            for _ in range(count):
                sources.append(start + places)
                targets.append(self._num_answers * self._cache.length + places)
                self._num_answers += 1
            start += len(prompt)
        batch = last_rows_of([prompt for prompt, _ in groups], self._model)
        self._shifts[first : self._num_answers] = shifts_of(batch, groups)
        source, target = (torch.from_numpy(np.concatenate(rows)).to(self._model.device) for rows in (sources, targets))
        self._cache.fill(source, target)
        return self._model.logits(replace(batch, cache=self._cache))

    def step(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        count = len(tokens)
        self._cache.append(positions, longest)
        batch = newest_tokens(tokens, positions, self._rows[: count + 1])
        axes = axes_after(self._model, positions, self._shifts)
        return self._model.logits(replace(batch, cache=self._cache, axes=axes))

    def move(self, pairs: list[tuple[int, int]], num_answers: int) -> None:
        self._cache.move(pairs)
        for old, new in pairs:
            self._shifts[new] = self._shifts[old]
        self._num_answers = num_answers


@dataclass
class OwnCache:
    """transformers' own attention and cache, over rows of one length at a time: no padding, and any kind of state."""

    mixes = False
    _model: SamplerModel
    _cache: Cache | None = None
    _shifts: Tensor | None = None

    def admit(self, groups: Sequence[Group]) -> Tensor:
        self._cache = cache = DynamicCache(config=self._model.pretrained.config.get_text_config())
        prompts = [prompt for prompt, _ in groups]
        batch = last_rows_of(prompts, self._model, row_length=len(prompts[0]))
        self._shifts = shifts_of(batch, groups)
        logits = self._model.logits(replace(batch, cache=cache))
        states = [getattr(layer, "keys", None) for layer in cache.layers]
        for name in ("conv_states", "recurrent_states"):
            states += [state for layer in cache.layers for state in getattr(layer, name, {}).values()]
        if all(state is None for state in states):
            raise ValueError("the model keeps no cache of keys and values")
        if len(prompts) < sum(count for _, count in groups):
            rows = [row for row, (_, count) in enumerate(groups) for _ in range(count)]
            cache.reorder_cache(torch.tensor(rows, device=self._model.device))
        return logits

    def step(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        assert self._shifts is not None
        batch = newest_tokens(tokens, positions, torch.arange(len(tokens) + 1, device=tokens.device))
        axes = axes_after(self._model, positions, self._shifts)
        return self._model.logits(replace(batch, row_length=1, cache=self._cache, axes=axes))

    def move(self, pairs: list[tuple[int, int]], num_answers: int) -> None:
        order = list(range(num_answers))
        for old, new in pairs:
            order[new] = old
        if self._cache is not None and self._shifts is not None and order:
            rows = torch.tensor(order, device=self._model.device)
            self._cache.reorder_cache(rows)
            self._shifts = self._shifts[rows]


@dataclass
class Recomputed:
    """No cache: every token takes a pass over its prompt and the answer so far."""

    mixes = True
    _model: SamplerModel
    _sequences: list[Sequence[int]] = field(default_factory=list)

    def admit(self, groups: Sequence[Group]) -> Tensor:
        self._sequences += [prompt for prompt, count in groups for _ in range(count)]
        return self._pass([prompt for prompt, _ in groups])

    def step(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        longer = zip(self._sequences, tokens.tolist(), strict=True)
        self._sequences = [followed(sequence, [token_id]) for sequence, token_id in longer]
        return self._pass(self._sequences)

    def _pass(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits after each sequence, in as few passes as hold them."""
        model, logits = self._model, list[Tensor]()
        for part in in_passes([*map(len, sequences)], model.max_pass_tokens, is_padded=model.is_padded):
            padded = row_length(max(map(len, sequences[part]))) if model.is_padded else None
            logits.append(model.logits(last_rows_of(sequences[part], model, row_length=padded)))
        return torch.cat(logits)

    def move(self, pairs: list[tuple[int, int]], num_answers: int) -> None:
        for old, new in pairs:
            self._sequences[new] = self._sequences[old]
        del self._sequences[num_answers:]


def in_passes(lengths: Sequence[int], most_tokens: int, *, is_padded: bool = False) -> Iterator[slice]:
    """Cut sequences of these lengths into passes of at most `most_tokens`, with at least one sequence in each."""
    start = 0
    for end in range(1, len(lengths) + 1):
        with_next = lengths[start : end + 1]
        num_tokens = len(with_next) * row_length(max(with_next)) if is_padded else sum(with_next)
        if end == len(lengths) or num_tokens > most_tokens:
            yield slice(start, end)
            start = end


def newest_tokens(tokens: Tensor, positions: Tensor, rows: Tensor) -> PackedBatch:
    """Return one new token of each answer as a batch of documents; `rows` counts them from 0 to their number."""
    return PackedBatch(
        token_ids=tokens,
        position_ids=positions,
        cu_seqlens=rows.int(),
        max_seqlen=1,
        label_rows=rows[:-1],
        label_ids=tokens,
        sample_counts=torch.ones_like(tokens),
    )


def shifts_of(batch: PackedBatch, groups: Sequence[Group]) -> Tensor:
    """Return how far the next position in the axes is from the number of tokens, int64, for each answer of groups.

    A picture takes fewer positions than tokens.
    """
    lengths = torch.tensor([len(prompt) for prompt, _ in groups], device=batch.token_ids.device)
    counts = torch.tensor([count for _, count in groups], device=lengths.device)
    ends = torch.zeros_like(lengths)
    if batch.axes is not None:
        starts = batch.cu_seqlens[: len(groups)].tolist()
        spans = zip(starts, lengths.tolist(), strict=True)
        ends = torch.stack([batch.axes[:, start : start + length].max() + 1 - length for start, length in spans])
    return ends.repeat_interleave(counts)


def axes_after(model: SamplerModel, positions: Tensor, shifts: Tensor) -> Tensor | None:
    """Return the axes (3, N) of new tokens at `positions`; None if the model has none, or no prompt has pictures."""
    if model.pictures is None or not model.pictures.has_axes:
        return None
    return (positions + shifts[: len(positions)]).expand(3, -1)


def last_rows_of(prompts: Sequence[Sequence[int]], model: SamplerModel, row_length: int | None = None) -> PackedBatch:
    """Return prompts, or prompts with their answers so far, as one batch whose label rows are their last tokens."""
    device = model.device
    samples = [(np.asarray(prompt), np.zeros(len(prompt), bool)) for prompt in prompts]
    num_boundaries = padded_num_boundaries(len(samples)) if device.type == "cuda" and row_length is None else None
    batch = flatten_samples(samples, num_boundaries=num_boundaries, row_length=row_length)
    last_rows = batch.cu_seqlens[: len(prompts)] + torch.tensor([len(prompt) for prompt in prompts]) - 1
    files = [pictures_of(prompt) for prompt in prompts]
    if model.pictures is not None and any(files):
        images = [decoded(file) for pictures in files for file in pictures]
        ids = [np.asarray(prompt) for prompt in prompts]
        batch = model.pictures.with_images(batch, images, [len(pictures) for pictures in files], ids)
    return replace(batch, label_rows=last_rows, label_ids=torch.zeros_like(last_rows)).to(device)


MAX_SLOTS = 1024
# of free memory; the rest is for passes
MAX_SHARE = 0.7
# slots have a multiple of this many places
_PLACES_MULTIPLE = 16
_SLOTS_MULTIPLE = 16


def open_slots(model: SamplerModel, num_answers: int, longest: int, token_id: int) -> tuple[Slots, int]:
    """Return slots for answers of up to `longest` tokens with their prompts, and how many: as many as have room.

    They take at most MAX_SHARE of what is free. A pass over `token_id` finds out what layers keep of a token. Raises
    NoRoomError if there is no room for one answer.
    """
    length = longest + -longest % _PLACES_MULTIPLE
    num_bytes = _bytes_of_a_token(model, token_id) * length
    budget = int(MAX_SHARE * free_bytes(model.device))
    wanted_slots = min(num_answers, MAX_SLOTS)
    # float8 products want a multiple of 16 rows
    unit = _SLOTS_MULTIPLE if model.device.type == "cuda" else 1
    num_slots = model.all_reduce_min(min(wanted_slots + -wanted_slots % unit, budget // num_bytes))
    if num_slots < 1:
        raise NoRoomError(
            f"an answer of {length:,} tokens with its prompt keeps {num_bytes / 2**30:.2f} GiB of keys and values, but "
            f"{budget / 2**30:.2f} GiB may be used; lower the number of new tokens or shorten the prompts"
        )
    num_slots -= num_slots % unit if num_slots > unit else 0
    if num_slots < wanted_slots:
        model.log(
            f"{num_slots:,} of {num_answers:,} answers are sampled at once: each keeps {num_bytes / 2**20:,.0f} MiB "
            f"of keys and values, and {budget / 2**30:.1f} GiB may be used"
        )
    cache = SlotCache(num_slots, length)
    return Slots(model, cache), num_slots


def _bytes_of_a_token(model: SamplerModel, token_id: int) -> int:
    """Return what all layers keep of a token, by a pass over one."""
    cache = SlotCache(1, 1)
    row = torch.zeros(1, dtype=torch.int64, device=model.device)
    cache.fill(row, row)
    model.logits(replace(last_rows_of([[token_id]], model), cache=cache))
    if not cache.num_bytes:
        raise ValueError("no layer keeps keys and values")
    return cache.num_bytes


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device."""
    if device.type != "cuda":
        available = available_host_bytes()
        return 1 << 33 if available is None else available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
