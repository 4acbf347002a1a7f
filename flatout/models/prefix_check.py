"""A check at start-up that, for this model, samples may share the prefixes with which they begin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from flatout.errors import Fix, SharedPrefixError
from flatout.models.blocks import hidden_states
from flatout.models.load.model import LoadedModel
from flatout.models.packed import PackedBatch, flatten_samples
from flatout.models.probe import checking, embedded_tokens, first_states, has_experts, relative_error, widened

_UNSHARED = Fix({"batch.share_prefix": "off"})
# tokens of a prefix (0: none), and what follows in each of its samples
_PREFIXES = ((8, (6, 3, 11)), (5, (2, 9)), (0, (6,)))
_PREFIX_TOKENS = sum(prefix_tokens + sum(lengths) for prefix_tokens, lengths in _PREFIXES)
_LIMITS, _16_BIT_LIMIT = {torch.float64: 1e-6, torch.float32: 1e-4}, 0.1
# states that have nothing in common differ by about 1.4
_MOST = 0.5
# what the embedded tokens are changed by to see what rounding does: the last bit of bf16
_ROUNDING = 1 / 256


def check_shared_prefixes(loaded: LoadedModel) -> str:
    """Check that samples that share prefixes have the states and gradients that they have without; return a line.

    Compares, after the first layers, the states that predict labels, and their gradient with respect to the embedded
    tokens, added up over a token's copies: within 1e-6 (fp64, as norms compute in fp32), 1e-4 (fp32), or in 16 bit 0.1
    or three times what rounding does, if that is more but below 0.5: the difference after random changes of the
    embedded tokens by up to one part in 256. Raises SharedPrefixError.
    """
    model = loaded.model
    with checking(loaded, SharedPrefixError, "shared prefixes", _UNSHARED):
        shared, apart = _prefix_batches(model)
        true = _states_and_gradient(model, apart)
        errors = _errors(model, _states_and_gradient(model, shared), true)
        limits = [_LIMITS.get(loaded.dtype, _16_BIT_LIMIT)] * 2
        if loaded.dtype.itemsize == 2:
            rounded = _errors(model, _states_and_gradient(model, apart, change=_ROUNDING), true)
            limits = [max(limit, min(3 * error, _MOST)) for limit, error in zip(limits, rounded, strict=True)]
    if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):
        raise SharedPrefixError(
            f"model type {model.config.model_type}: shared prefixes change hidden states by {errors[0]:.1e} (limit "
            f"{limits[0]:.1e}), gradients by {errors[1]:.1e} (limit {limits[1]:.1e}); attention {loaded.attention}",
            [_UNSHARED],
        )
    return f"; shared prefixes = unshared within {errors[0]:.1e}, gradients {errors[1]:.1e}"


def _prefix_batches(model: PreTrainedModel) -> tuple[PackedBatch, PackedBatch]:
    """Return the same samples with shared prefixes and without; tokens differ, but for padding and copies."""
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    token_ids = np.random.default_rng(0).permutation(num_embeddings - 1)[:_PREFIX_TOKENS] + 1
    samples, start = [], 0
    for prefix_tokens, lengths in _PREFIXES:
        prefix, start = token_ids[start : start + prefix_tokens], start + prefix_tokens
        for length in lengths:
            ids, start = np.concatenate([prefix, token_ids[start : start + length]]), start + length
            samples.append((ids, np.arange(len(ids)) > prefix_tokens))
    shared = [(prefix_tokens, len(suffixes)) for prefix_tokens, suffixes in _PREFIXES if prefix_tokens]
    # both of a multiple of the SIMD width
    batches = (flatten_samples(samples, fill_tokens=128, shared=prefixes) for prefixes in (shared, ()))
    sharing, unshared = (batch.to(model.device) for batch in batches)
    return sharing, unshared


def _errors(model: PreTrainedModel, ours: Sequence[torch.Tensor], true: Sequence[torch.Tensor]) -> list[float]:
    experts = has_experts(model)
    return [relative_error(mine, other, experts, [len(other)]) for mine, other in zip(ours, true, strict=True)]


def _states_and_gradient(
    model: PreTrainedModel, batch: PackedBatch, *, change: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the label rows' states after the first layers (L, D), and a gradient of theirs by token id (ids, D).

    See `embedded_tokens` for `change`.
    """
    with first_states(model) as captured, embedded_tokens(model, change) as embedded:
        hidden_states(model, batch)
        states = captured[0][batch.label_rows]
        direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
        (gradient,) = torch.autograd.grad(states, embedded, direction)
    ids, places = batch.token_ids.unique(return_inverse=True)
    by_token = widened(gradient.new_zeros(len(ids), gradient.shape[-1])).index_add(0, places, widened(gradient[0]))
    return widened(states.detach()), by_token
