"""One second at start-up that proves, for the model at hand, that packed documents never see each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from flatout.errors import NumericError, UsageError
from flatout.models.head import document_arguments, packed_loss
from flatout.models.load import LoadedModel
from flatout.models.packed import PackedBatch, pack

# uneven, and 32 in all: rotary's float32 cosines differ in the last bit off the multiples of the CPU's vector
_LENGTHS = (8, 19, 3, 2)
_TOTAL = sum(_LENGTHS)
# transformers' eager attention takes its softmax in float32 whatever the model's dtype
_TOLERANCES = {("sdpa", torch.float64): 1e-10, ("eager", torch.float64): 1e-5}
_FLOAT32_TOLERANCE = 1e-4


def check_packing(loaded: LoadedModel) -> str:
    """Prove packing on four small documents; returns a line for the console.

    Checks that (1) changing one document changes no logit of another, to the bit; (2) packed logits equal those of
    each document alone through transformers' own attention, within 1e-10 (fp64), 1e-4 (fp32), or for 16 bit three
    times the difference between transformers' own two attentions; (3) the head's loss equals cross-entropy over the
    model's logits. Experts are grouped by all tokens of a batch, so their rounding may move: there (1) holds to the
    tolerance of (2). Random state and mode of the model are left as found.
    Raises UsageError naming the model type when packing is not exact, NumericError when its logits are not finite.
    """
    model = loaded.model
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(model.device.type, dtype=loaded.dtype, enabled=loaded.autocast):
            return _check(loaded)
    finally:
        model.train(was_training)


def _check(loaded: LoadedModel) -> str:
    model, kind = loaded.model, loaded.model.config.model_type
    batch = _test_batch(model)
    ours = _logits(model, batch)
    if not bool(ours.isfinite().all()):
        raise NumericError(f"model type {kind}: logits of the self-test are not finite; check weights and precision")
    alone, tolerance = _alone_logits(loaded, batch)
    error = _error(ours, alone, has_experts(model))
    if error > tolerance:
        raise UsageError(
            f"model type {kind}: packed logits differ from each document alone by {error:.1e} (limit {tolerance:.1e}) "
            f"with attention {loaded.attention}; set model.attention: plain, or choose another model"
        )
    leak = _leak(model, batch, ours)
    if leak > (tolerance if has_experts(model) else 0.0):
        raise UsageError(
            f"model type {kind}: a packed document changes another one's logits by {leak:.1e} with attention "
            f"{loaded.attention}; set model.attention: plain, or choose another model"
        )
    _check_head(loaded, batch, ours)
    return f"packed = alone within {error:.1e}, no leak between documents, head loss = cross-entropy"


def has_experts(model: PreTrainedModel) -> bool:
    """Whether the model routes tokens to experts."""
    config = model.config.get_text_config()
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _test_batch(model: PreTrainedModel) -> PackedBatch:
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    token_ids = np.random.default_rng(0).integers(0, num_embeddings, _TOTAL)
    documents = np.split(token_ids, np.cumsum(_LENGTHS)[:-1])
    return pack([(ids, np.ones(len(ids), bool)) for ids in documents]).to(model.device)


def _logits(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    output = model(
        input_ids=batch.token_ids[None],
        position_ids=batch.position_ids[None],
        use_cache=False,
        **document_arguments(batch),
    )
    return _exact(output.logits[0])


def _alone_logits(loaded: LoadedModel, batch: PackedBatch) -> tuple[torch.Tensor, float]:
    """Each document alone through transformers' attention (T, V), and how far packed logits may be from that.

    The documents are rows of one batch, filled up behind: a causal model never looks there.
    """
    model = loaded.model
    documents = batch.token_ids.split(_LENGTHS)
    rows = torch.stack([torch.cat([ids, ids.new_zeros(_TOTAL - len(ids))]) for ids in documents])
    results = {}
    for name in ("sdpa", "eager"):
        with _transformers_attention(model, name) as usable:
            if usable:
                logits = model(input_ids=rows, use_cache=False).logits
                results[name] = _exact(torch.cat([logits[i, :length] for i, length in enumerate(_LENGTHS)]))
    trusted = "sdpa" if "sdpa" in results else "eager"
    if loaded.dtype.itemsize > 2:
        return results[trusted], _TOLERANCES.get((trusted, loaded.dtype), _FLOAT32_TOLERANCE)
    noise = _error(results[trusted], results["eager"], has_experts(model))
    return results[trusted], max(3 * noise, 4 * torch.finfo(loaded.dtype).eps)


@contextmanager
def _transformers_attention(model: PreTrainedModel, name: str) -> Iterator[bool]:
    """Run with transformers' own attention; yields False when this model does not have that one."""
    ours = model.config.get_text_config()._attn_implementation
    softcapped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    usable = not (name == "sdpa" and softcapped)
    if usable:
        try:
            model.set_attn_implementation(name)
        except ValueError:
            usable = False
    try:
        yield usable
    finally:
        model.set_attn_implementation(ours)


def _error(ours: torch.Tensor, truth: torch.Tensor, experts: bool) -> float:
    """Relative L2 error, the worst of the documents; with experts the median token.

    Rounding may send a token to another expert, which moves that token far and says nothing about packing.
    """
    if experts:
        return float(((ours - truth).norm(dim=-1) / truth.norm(dim=-1)).median())
    pairs = zip(ours.split(_LENGTHS), truth.split(_LENGTHS), strict=True)
    return max(float((mine - true).norm() / true.norm()) for mine, true in pairs)


def _leak(model: PreTrainedModel, batch: PackedBatch, before: torch.Tensor) -> float:
    """Largest change of a logit of documents 0 and 2 when 1 and 3 change, and the other way round."""
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    parity = torch.tensor(list(itertools.chain(*([i % 2] * length for i, length in enumerate(_LENGTHS)))))
    parity = parity.to(batch.token_ids.device)
    changes = []
    for kept in (0, 1):
        token_ids = torch.where(parity == kept, batch.token_ids, (batch.token_ids + 1) % num_embeddings)
        changed = PackedBatch(
            token_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen, batch.label_rows, batch.label_ids
        )
        difference = (_logits(model, changed) - before).abs().amax(-1)[parity == kept]
        changes.append(float(difference.median() if has_experts(model) else difference.max()))
    return max(changes)


def _check_head(loaded: LoadedModel, batch: PackedBatch, logits: torch.Tensor) -> None:
    ours = float(packed_loss(loaded.model, batch).loss_sum)
    truth = float(F.cross_entropy(logits[batch.label_rows], batch.label_ids, reduction="sum"))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(loaded.dtype, 4 * torch.finfo(loaded.dtype).eps)
    if not abs(ours - truth) <= tolerance * max(abs(truth), 1.0):
        raise UsageError(
            f"model type {loaded.model.config.model_type}: the head's loss is {ours:.6f}, but cross-entropy over its "
            f"logits is {truth:.6f}; it changes its logits in a way flatout does not know; choose another model"
        )


def _exact(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
