"""One-second checks at start-up that, for this model, documents do not affect each other and may share prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from flatout.errors import Fix, NumericError, PackingError, SharedPrefixError, UsageError, first_line
from flatout.models.arch_quirks import WINDOW_FIELDS, packed_hybrid
from flatout.models.blocks import (
    TRANSFORMERS_ATTENTION,
    attention_of_parts,
    hidden_states,
    last_states,
    model_inputs,
)
from flatout.models.context.shard import MIN_CHUNK_TOKENS, ContextShard
from flatout.models.load.auto_class import is_scoring
from flatout.models.load.model import LoadedModel
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import PackedBatch, flatten_samples
from flatout.models.probe import (
    MAX_LONG_TOKENS,
    PROBE_LENGTHS,
    checking,
    embedded_tokens,
    evaluating,
    first_states,
    has_experts,
    random_batch,
    relative_error,
    widened,
)
from flatout.models.rope import length_limits, plain_rope
from flatout.models.scoring import ScoreHead, last_position
from flatout.models.token_head import TokenHead

# transformers' eager attention computes its softmax in float32 for every dtype
_TOLERANCES = {("sdpa", torch.float64): 1e-10, ("eager", torch.float64): 1e-5}
_FLOAT32_TOLERANCE = 1e-4
OFF_WIDTH = 1e-6  # rope's float32 cosines vary at lengths off the SIMD width
_NO_INTERFACE = "its attention does not go through transformers' attention interface"
T = TypeVar("T")
# the largest logit with which the head is compared: far beyond the caps of known models
_AMPLIFIED = 1000.0
_UNSHARED = Fix({"batch.share_prefix": "off"})
# tokens of a prefix (0: none), and what follows in each of its samples
_PREFIXES = ((8, (6, 3, 11)), (5, (2, 9)), (0, (6,)))
_PREFIX_TOKENS = sum(prefix_tokens + sum(lengths) for prefix_tokens, lengths in _PREFIXES)
# of states after the first layers; those that have nothing in common differ by about 1.4
_STATE_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4}
_16_BIT_LIMIT, _FLOAT8_LIMIT, _MOST = 0.1, 0.2, 0.5
# what the embedded tokens are changed by to see what rounding does: the last bit of bf16
_ROUNDING = 1 / 256


def prove_layout(
    loaded: LoadedModel, *, longest: int, any_attention: bool, shares_prefixes: bool = False
) -> tuple[LoadedModel, str]:
    """Prove the model's layout as `check_packing` does; return the model to train and a line for the console.

    With `shares_prefixes`, `check_shared_prefixes` follows. If rows fail with our attention, and `any_attention` will
    do, they are proved with transformers' own.
    """
    try:
        line = check_packing(loaded, longest=longest)
        return loaded, line + (check_shared_prefixes(loaded) if shares_prefixes else "")
    except PackingError:
        if not (loaded.is_padded and any_attention) or loaded.attention == "transformers":
            raise
        config = loaded.model.config.get_text_config()
    # models without an interface for attention only log that theirs cannot be set, and have the eager one
    config._attn_implementation = next((name for name in TRANSFORMERS_ATTENTION if _sets(loaded.model, name)), "eager")
    loaded = replace(loaded, attention="transformers")
    return loaded, f"{check_packing(loaded, longest=longest)}; with transformers' own attention and masks"


def check_packing(loaded: LoadedModel, *, longest: int = 0) -> str:
    """Check packing on four small documents; return a line for the console.

    (1) Packed logits equal those of each document alone with transformers' own attention: within 1e-10 (fp64), 1e-4
    (fp32), or in 16 bit three times the difference of transformers' sdpa and eager attention.
    (2) Changing one document leaves the logits of the others bitwise equal; with experts, which are grouped over all
    tokens of a batch, within the tolerance of (1).
    (3) The head's logits equal the whole model's, also where they are large, and its loss is cross-entropy over them.

    If the run's longest document, of `longest` tokens, exceeds a window or a limit of rope, (1) is repeated on the last
    hidden states with a document of up to twice the limit, at most `longest` or 16,384 tokens, between short ones.
    Rows are checked alike: their padding must not matter, and (1) allows at least 1e-6 and, in 16 bit, three times what
    transformers' own padded rows differ. Raises PackingError if the layout is not exact, and NumericError for logits
    that are not finite.
    """
    model = loaded.model
    with checking(loaded, PackingError, f"{_kind(loaded)} documents"), torch.no_grad():
        error, tolerance = _check(loaded)
        if packed_hybrid(model.config)[1]:
            _check_backward(loaded)
        line = f"{_kind(loaded)} = alone within {error:.1e}, no leak between documents, "
        line += "scores = transformers'" if is_scoring(model.config) else "head loss = cross-entropy"
        windows = (getattr(model.config.get_text_config(), name, None) for name in WINDOW_FIELDS)
        known = {window for window in windows if isinstance(window, int)} | length_limits(model)
        limits = sorted(limit for limit in known if 0 < limit < min(longest, MAX_LONG_TOKENS))
        if limits:
            line += _check_long(loaded, limits, min(2 * limits[-1], longest, MAX_LONG_TOKENS), tolerance)
        return line


def _check(loaded: LoadedModel) -> tuple[float, float]:
    """Return the error of packed logits, and the tolerance that was applied."""
    model, kind, experts = loaded.model, loaded.model.config.model_type, has_experts(loaded.model)
    layout, document = _kind(loaded), torch.arange(len(PROBE_LENGTHS)).repeat_interleave(torch.tensor(PROBE_LENGTHS))
    # plain avoids kernel faults; any other fault is in the model's code, such as computing its own positions
    fixes = [] if loaded.attention in ("sdpa", "plain") else [Fix({"model.attention": "plain"})]
    fixes.append(Fix({}, "choose a different model"))
    batch = random_batch(model, PROBE_LENGTHS, row_length=sum(PROBE_LENGTHS) if loaded.is_padded else None)
    # documents (T,) of the tokens; -1 for padding
    owner = torch.full_like(batch.token_ids, -1)
    owner[_real(batch, PROBE_LENGTHS)] = document.to(owner.device)
    ours, is_real = _logits(model, batch), owner >= 0
    if not bool(ours.isfinite().all()):
        raise NumericError(f"model type {kind}: logits of the self-test are not finite; check weights and precision")
    single, tolerance = _single_document_logits(loaded, batch)
    error = relative_error(ours[is_real], single, experts, PROBE_LENGTHS)
    if not error <= tolerance:
        raise PackingError(
            f"model type {kind}: {layout} logits differ from those of single documents by {error:.1e} "
            f"(limit {tolerance:.1e}) with attention {loaded.attention}",
            fixes,
        )
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    leaks = []
    for parity in (0, 1):
        # change documents 1 and 3 and all padding, which must not affect 0 and 2, and vice versa
        of_parity = is_real & (owner % 2 == parity)
        token_ids = torch.where(of_parity, batch.token_ids, (batch.token_ids + 1) % num_embeddings)
        changes = (_logits(model, replace(batch, token_ids=token_ids)) - ours).abs().amax(-1)[of_parity]
        leaks.append(changes.median() if experts else changes.max())
    leak = torch.stack(leaks).max().item()
    if not leak <= (tolerance if experts else 0.0):
        raise PackingError(
            f"model type {kind}: one {layout} document changes the logits of another by {leak:.1e} with "
            f"attention {loaded.attention}",
            fixes,
        )
    _check_head(loaded, batch, ours, is_real)
    return error, tolerance


def _check_head(loaded: LoadedModel, batch: PackedBatch, logits: torch.Tensor, is_real: torch.Tensor) -> None:
    """Compare the head's loss with cross-entropy over the model's logits, and its logits with them at `_AMPLIFIED`.

    A random model's logits are so small that a soft-cap hardly changes them. No cap, scale or cut can hide in logits
    from a head whose output is amplified.
    """
    model, kind = loaded.model, loaded.model.config.model_type
    if is_scoring(model.config):
        return _check_scores(loaded, batch, is_real)
    # some models return float32 logits in every dtype
    exact = logits.dtype if loaded.dtype.itemsize > 2 else loaded.dtype
    limit = {torch.float64: 1e-10, torch.float32: 1e-4}.get(exact, 4 * torch.finfo(loaded.dtype).eps)
    unknown = "it transforms the logits in a way that flatout does not support; choose a different model"
    head, states = model.get_output_embeddings(), hidden_states(model, batch)
    factor = _AMPLIFIED / float(head(states).abs().amax().clamp_min(torch.finfo(torch.float32).tiny))
    with head.register_forward_hook(lambda module, args, output: output * factor):
        expected, ours = _logits(model, batch)[is_real], widened(TokenHead(model, len(states)).logits(states)[is_real])
    if expected.shape != ours.shape:
        raise UsageError(f"model type {kind} has {expected.shape[-1]} logits, but its head {ours.shape[-1]}; {unknown}")
    error = relative_error(ours, expected.to(ours.dtype), has_experts(model), PROBE_LENGTHS)
    if not error <= limit:
        raise UsageError(f"model type {kind} has logits that differ from its head's by {error:.1e}; {unknown}")
    loss = float(packed_cross_entropy(model, batch).loss_sum)
    truth = float(F.cross_entropy(logits[batch.label_rows], batch.label_ids, reduction="sum"))
    if not abs(loss - truth) <= limit * max(abs(truth), 1.0):
        raise UsageError(
            f"model type {kind}: the head's loss is {loss:.6f}, but cross-entropy over its logits is {truth:.6f}; "
            f"{unknown}"
        )


def _check_scores(loaded: LoadedModel, batch: PackedBatch, is_real: torch.Tensor) -> None:
    model, head = loaded.model, ScoreHead(loaded.model)
    ends = torch.tensor(PROBE_LENGTHS).cumsum(0)
    documents, states = batch.token_ids[is_real].split(PROBE_LENGTHS), hidden_states(model, batch)[is_real]
    ours, truth = [], []
    for ids, end in zip(documents, ends.tolist(), strict=True):
        last = last_position(ids.cpu().numpy(), model.config.get_text_config().pad_token_id)
        ours.append(head(states[end - len(ids) + last][None]))
        single = flatten_samples([(ids.cpu().numpy(), np.ones(len(ids), bool))]).to(model.device)
        truth.append(widened(model(use_cache=False, **model_inputs(model, single)[0]).logits))
    limit = {torch.float64: 1e-5, torch.float32: 1e-4}.get(loaded.dtype, 0.05)
    our_scores, true_scores = torch.cat(ours).double(), torch.cat(truth).double()
    error = float((our_scores - true_scores).norm() / true_scores.norm().clamp_min(torch.finfo(torch.float32).tiny))
    if not error <= limit and not has_experts(model):
        raise UsageError(
            f"model type {model.config.model_type} has scores that differ from transformers' own by {error:.1e} (limit "
            f"{limit:.0e}): its `score` is not all of its head; choose a different model"
        )


def _check_backward(loaded: LoadedModel) -> None:
    """Run a backward pass to the embeddings: libraries of recurrent kernels refuse some compilers and GPUs in it."""
    batch = random_batch(loaded.model, PROBE_LENGTHS, row_length=sum(PROBE_LENGTHS) if loaded.is_padded else None)
    try:
        with embedded_tokens(loaded.model) as embedded:
            torch.autograd.grad(packed_cross_entropy(loaded.model, batch).loss_sum, embedded)
    except RuntimeError as error:
        raise UsageError(
            f"model type {loaded.model.config.model_type}: its recurrent layers cannot be trained with the packages "
            f"installed here: {first_line(error)}"
        ) from error


def _check_long(loaded: LoadedModel, limits: list[int], num_tokens: int, tolerance: float) -> str:
    """Compare packed and single hidden states with a document of `num_tokens`, beyond every limit, among short ones."""
    model, lengths = loaded.model, (8, num_tokens, 19, 3)
    batch = random_batch(model, lengths, row_length=max(lengths) if loaded.is_padded else None)
    real = _real(batch, lengths)
    ours = widened(hidden_states(model, batch)[real])
    documents = batch.token_ids[real].split(lengths)
    with own_attention(model):
        states = [last_states(model, {"input_ids": ids[None]})[0] for ids in documents]
    # the tokens beyond the first limit are compared separately
    parts = (8, limits[0], num_tokens - limits[0], 19, 3)
    error = relative_error(ours, widened(torch.cat(states)), has_experts(model), parts)
    # sums are longer than for short documents; in fp64, rope's float32 cosines vary at lengths off the SIMD width
    tolerance = max(3 * tolerance, 1e-6)
    if not error <= tolerance:
        raise PackingError(
            f"model type {model.config.model_type}: a {_kind(loaded)} document of {num_tokens} tokens differs from the "
            f"same document alone by {error:.1e} (limit {tolerance:.1e}) with attention {loaded.attention}",
            [Fix({"model.attention": "plain"}), Fix({"data.max_tokens": limits[0]})],
        )
    return f"; beyond {limits[-1]:,} tokens within {error:.1e}"


def _logits(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    inputs, rows = model_inputs(model, batch)
    logits = widened(_outputs(model, inputs).flatten(0, 1))
    return logits if rows is None else logits[rows]


def _outputs(model: PreTrainedModel, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return logits (B, S, V); of a model that scores, what its head reads, as its own outputs are of last tokens."""
    if is_scoring(model.config):
        return last_states(model, dict(inputs))
    return model(use_cache=False, **inputs).logits


def _real(batch: PackedBatch, lengths: Sequence[int]) -> torch.Tensor:
    starts = batch.cu_seqlens[: len(lengths)].tolist()
    parts = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return torch.cat(parts).to(batch.token_ids.device)


def _kind(loaded: LoadedModel) -> str:
    return "rows" if loaded.is_padded else "packed"


def _single_document_logits(loaded: LoadedModel, batch: PackedBatch) -> tuple[torch.Tensor, float]:
    """Return logits (T, V) of each document alone with transformers' attention, and the tolerance for packed ones.

    For packed documents, they are rows of one batch, padded on the right, which causal attention never reads.
    """
    model, documents = loaded.model, batch.token_ids[_real(batch, PROBE_LENGTHS)].split(PROBE_LENGTHS)
    rows = torch.stack([F.pad(ids, (0, sum(PROBE_LENGTHS) - len(ids))) for ids in documents])

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        logits = _outputs(model, {"input_ids": rows})
        padded = widened(torch.cat([logits[i, :n] for i, n in enumerate(PROBE_LENGTHS)]))
        if not loaded.is_padded:
            return padded, padded
        return widened(torch.cat([_outputs(model, {"input_ids": ids[None]})[0] for ids in documents])), padded

    results = by_attention(model, compute)
    trusted = next(iter(results))
    single, padded = results[trusted]

    def noise() -> float:
        others = (results["eager"][0], padded)
        return max(relative_error(single, other, has_experts(model), PROBE_LENGTHS) for other in others)

    tolerance = tolerance_of(trusted, loaded.dtype, noise)
    return single, max(tolerance, OFF_WIDTH) if loaded.is_padded else tolerance


def tolerance_of(trusted: str, dtype: torch.dtype, noise: Callable[[], float]) -> float:
    """Return the error allowed beside transformers' attention `trusted`: in 16 bit, three times that of its others."""
    if dtype.itemsize > 2:
        return _TOLERANCES.get((trusted, dtype), _FLOAT32_TOLERANCE)
    return max(3 * noise(), 4 * torch.finfo(dtype).eps)


def by_attention(model: PreTrainedModel, compute: Callable[[], T]) -> dict[str, T]:
    """Return what `compute` returns with each of transformers' own attentions, the most trusted first.

    Raises ValueError for a model that supports none.
    """
    results: dict[str, T] = {}
    for name in TRANSFORMERS_ATTENTION:
        with transformers_attention(model, name) as usable:
            if usable:
                results[name] = compute()
    if not results:
        raise ValueError(_NO_INTERFACE)
    return results


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use the first of transformers' own attentions that this model supports. Raises ValueError if it has none."""
    for name in TRANSFORMERS_ATTENTION:
        with transformers_attention(model, name) as usable:
            if usable:
                yield
                return
    raise ValueError(_NO_INTERFACE)


@contextmanager
def transformers_attention(model: PreTrainedModel, name: str) -> Iterator[bool]:
    """Use transformers' own attention in this context; yields False if this model does not support it."""
    ours = attention_of_parts(model)
    usable = _sets(model, name)
    try:
        with plain_rope(model):
            yield usable
    finally:
        model.set_attn_implementation(ours)


def _sets(model: PreTrainedModel, name: str) -> bool:
    config = model.config.get_text_config()
    if name == "sdpa" and getattr(config, "attn_logit_softcapping", None):
        return False
    with suppress(ValueError):
        model.set_attn_implementation(name)
    return bool(config._attn_implementation == name)


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
        limits = [_STATE_LIMITS.get(loaded.dtype, _16_BIT_LIMIT)] * 2
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


def check_shard(loaded: LoadedModel, shard: ContextShard, *, fp8: bool = False) -> tuple[float, float]:
    """Return by how much a rank's shard of a micro-batch differs from the whole after the first layers, and a limit.

    The micro-batch has documents that are cut and some that are not. `fp8`: products are in float8, whose scales may
    depend on all tokens of a pass. Collective over the ranks that share it; the model's mode and the random state do
    not change.
    """
    model = loaded.model
    # float8 products need multiples of 16 tokens
    lengths = (3, 2 * shard.num_shards * MIN_CHUNK_TOKENS + 5, 150, 34)
    number = shard.num_boundaries(len(lengths)) if model.device.type == "cuda" else None
    batch = random_batch(model, lengths)
    on_host = batch.to(torch.device("cpu"))
    numbered = shard.of(replace(on_host, token_ids=torch.arange(batch.num_tokens)), number)
    real_rows = torch.nonzero(numbered.sample_counts).flatten().to(model.device)
    with evaluating(model), torch.no_grad(), loaded.casting(), first_states(model) as states:
        hidden_states(model, batch)
        hidden_states(model, shard.of(on_host, number).to(model.device))
    plain = widened(states[0]).index_select(0, numbered.token_ids.to(model.device)[real_rows])
    ours = widened(states[1])[real_rows]
    # in fp64, rope's float32 cosines vary at lengths off the SIMD width
    limit = _STATE_LIMITS.get(loaded.dtype, _16_BIT_LIMIT)
    return relative_error(ours, plain, has_experts(model), (len(real_rows),)), max(limit, _FLOAT8_LIMIT if fp8 else 0.0)
