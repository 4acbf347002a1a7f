"""Draw tokens from logits; the random number of a draw is a function of its key and count, not of a generator."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.rollout.sampler import SamplingParams

_LOW = (1 << 32) - 1
_WHOLE, _BLOCK = float(1 << 48), 1024


def draw_key(seed: int, prompt: int, completion: int) -> int:
    """Return a key of 62 bits for all draws of one completion."""
    digest = hashlib.blake2b(f"{seed} {prompt} {completion}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def uniform(keys: Tensor, counts: Tensor) -> Tensor:
    """Return fp64 numbers in [0, 1) with 53 random bits, the same on every device; int64 arguments of one shape."""
    first = _mixed((keys & _LOW) ^ _mixed((keys >> 32) ^ _mixed(counts & _LOW)))
    second = _mixed(first ^ _mixed((keys + 0x9E3779B9) & _LOW))
    return (first * (1 << 21) + (second >> 11)).double() * 2.0**-53


def _mixed(values: Tensor) -> Tensor:
    """Permute numbers of 32 bits, in int64, by the hash lowbias32 of hash-prospector."""
    values = ((values ^ (values >> 16)) * 0x7FEB352D) & _LOW
    # products wrap around; their low bits are right
    values = ((values ^ (values >> 15)) * 0x846CA68B) & _LOW
    return values ^ (values >> 16)


def choose(
    logits: Tensor, params: SamplingParams, keys: Tensor, counts: Tensor, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a token of each row of logits (N, V), int64 (N,), and its log-probability in the logits' dtype.

    `keys` and `counts` int64 (N,) decide the draws; `seen` bool (N, V) are tokens for the repetition penalty.
    """
    scores = logits
    if params.never_ids:
        scores = scores.clone()
        for token_id in params.never_ids:
            scores[:, token_id] = float("-inf")
    if seen is not None:
        penalty = params.repetition_penalty
        scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    if params.temperature == 0:
        chosen = scores.argmax(-1)
    else:
        scores = scores if params.temperature == 1 else scores / params.temperature
        chosen = _first_beyond(_cut(scores, params).softmax(-1), uniform(keys, counts)[:, None])
    return chosen, logits.gather(-1, chosen[:, None])[:, 0] - logits.logsumexp(-1)


def _first_beyond(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return the first token at which the sum of `weights` (N, V) exceeds numbers (N, 1) in [0, 1), int64 (N,).

    Finds its block by the sums of blocks, then the token: a tenth of the memory traffic of one running sum. Sums are of
    integers, parts of 2^-48, as those of floats depend on the order.
    """
    blocks = F.pad(weights, (0, -weights.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    sums = (blocks.sum(-1, dtype=torch.float64) * _WHOLE).long().cumsum(-1)
    bounds = (numbers * sums[:, -1:]).long()
    block = torch.searchsorted(sums, bounds, right=True).clamp(max=sums.shape[-1] - 1)
    before = F.pad(sums, (1, 0)).gather(-1, block)
    block_weights = blocks.gather(1, block[..., None].expand(-1, 1, _BLOCK))[:, 0]
    inner = (block_weights.double() * _WHOLE).long().cumsum(-1)
    # parts are rounded down, so those of a block's tokens may be fewer than the block's
    offset = torch.searchsorted(inner, torch.minimum(bounds - before, inner[:, -1:] - 1), right=True)
    return (block * _BLOCK + offset)[:, 0]


def _cut(scores: Tensor, params: SamplingParams) -> Tensor:
    """Return scores with -inf for the tokens that top_k, top_p and min_p leave out."""
    if params.top_k is not None and params.top_k < scores.shape[-1]:
        smallest = scores.topk(params.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    if params.top_p is not None and params.top_p < 1:
        ordered = scores.sort(-1, descending=True).values
        parts = (ordered.softmax(-1, dtype=torch.float64) * _WHOLE).long()
        # a token stays if those before it do not have the probability yet
        is_kept = parts.cumsum(-1) - parts < params.top_p * _WHOLE
        smallest = ordered.masked_fill(~is_kept, float("inf")).amin(-1, keepdim=True)
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    if params.min_p:
        probabilities = scores.softmax(-1)
        limit = probabilities.amax(-1, keepdim=True) * params.min_p
        scores = scores.masked_fill(probabilities < limit, float("-inf"))
    return scores
