"""The reference of an objective: its own sums over what plain transformers computes, one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.data.token_store import TokenStore
from flatout.errors import UsageError
from flatout.objectives.loss_inputs import Batch, LabelTokens, LossInputs, LossSums, SampleScores, TokenLosses
from flatout.objectives.protocol import Objective
from flatout.verifier.plain_loop import PlainModel, Sample, token_losses, wide_dtype


def objective_step(
    plain: PlainModel,
    objective: Objective,
    store: TokenStore,
    sample_ids: Sequence[int],
    kl_store: TokenStore | None,
    *,
    dtype: torch.dtype = torch.float64,
) -> float:
    """Return the loss of one step and accumulate its gradient; the whole step is one call of the objective, in `dtype`.

    `kl_store` has the same samples with answers to other prompts, if the objective estimates something. A first pass
    gives log-probabilities or scores, the objective their gradients, and a second those of weights. Raises UsageError
    for an objective that reads hidden states, which plain transformers does not have by label.
    """
    plain.model.zero_grad(set_to_none=True)
    inputs, leaf, counts = _loss_inputs(plain, objective, store, sample_ids, dtype)
    if kl_store is not None:
        sums = objective.estimate(_loss_inputs(plain, objective, kl_store, sample_ids, dtype)[0])
        inputs.estimates = {name: value.detach().double() / len(sample_ids) for name, value in sums.items()}
    loss = objective(inputs)["loss"] / _normalizer(objective, inputs.batch)
    (gradient,) = torch.autograd.grad(loss, leaf)
    for sample, grad in zip(plain.read(store, sample_ids), gradient.split(counts), strict=True):
        (_read(plain, objective, sample)[0] * grad).sum().backward()
    return float(loss.detach())


def _read(plain: PlainModel, objective: Objective, sample: Sample) -> tuple[Tensor, ...]:
    return _plain_scores(plain, sample) if objective.reads == "scores" else plain_logprobs(plain, sample)


def _loss_inputs(
    plain: PlainModel, objective: Objective, store: TokenStore, sample_ids: Sequence[int], dtype: torch.dtype
) -> tuple[LossInputs, Tensor, list[int]]:
    """Return what an objective reads of samples, its values as a leaf, and their number of each sample."""
    with torch.no_grad():
        values_by_sample = [_read(plain, objective, sample) for sample in plain.read(store, sample_ids)]
    leaf = torch.cat([values for values, *_ in values_by_sample]).to(dtype).requires_grad_()
    counts = [len(values) for values, *_ in values_by_sample]
    columns = [name for name in objective.needed_columns if name in store.extra]
    batch: Any = _gathered(columns, store, sample_ids, counts, leaf.device)
    if objective.reads == "scores":
        return SampleScores(leaf.view(len(values_by_sample), -1), batch, lambda rows: rows), leaf, counts
    return _PlainLabels(leaf, values_by_sample, batch), leaf, counts


def plain_logprobs(plain: PlainModel, sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of each label token of a sample, whether it is the likeliest, and the token ids."""
    device = next(plain.model.parameters()).device
    ids, mask = (torch.tensor(part.tolist(), device=device) for part in sample[:2])
    with torch.autocast(device.type, dtype=plain.autocast) if plain.autocast else nullcontext():
        logits = plain.model(**sample.given(device), use_cache=False).logits[0, :-1]
    logits, targets = logits[mask[1:]], ids[1:][mask[1:]]
    return -token_losses(logits, targets), logits.argmax(-1) == targets, targets


def _plain_scores(plain: PlainModel, sample: Sample) -> tuple[Tensor, ...]:
    """Return the scores (K,) of a sample, by transformers' own choice of its last token."""
    device = next(plain.model.parameters()).device
    with torch.autocast(device.type, dtype=plain.autocast) if plain.autocast else nullcontext():
        scores = plain.model(**sample.given(device), use_cache=False).logits[0]
    return (scores.to(wide_dtype(plain)),)


def _gathered(
    names: Sequence[str], store: TokenStore, sample_ids: Sequence[int], counts: Sequence[int], device: torch.device
) -> SimpleNamespace:
    """Return what a batch of the whole step would carry, read sample by sample."""
    units = [int(store.units_of(np.array([sample_id]))[0]) for sample_id in sample_ids]
    unique, columns = list(dict.fromkeys(units)), {}
    for name in names:
        per, values = store.columns[name].per, store.extra[name]
        if per == "token":
            read = [(store.sample(sample_id, [name])) for sample_id in sample_ids]
            label_values = [sample.columns[name][1:][sample.loss_mask[1:]] for sample in read]
            columns[name] = torch.from_numpy(np.concatenate(label_values)).to(device)
        else:
            indices = sample_ids if per == "sample" else unique
            columns[name] = torch.tensor([values[index] for index in indices], device=device)
    numbers = torch.arange(len(counts), device=device)
    return SimpleNamespace(
        label_samples=numbers.repeat_interleave(torch.tensor(counts, device=device)),
        sample_units=torch.tensor([unique.index(unit) for unit in units], device=device),
        num_samples=len(units),
        num_units=len(unique),
        num_label_tokens=int(store.num_label_tokens[list(sample_ids)].sum()),
        last_rows=numbers,
        columns=columns,
    )


def _normalizer(objective: Objective, batch: Batch) -> float:
    counts = {"labels": batch.num_label_tokens, "samples": batch.num_samples, "units": batch.num_units}
    name = objective.normalizer
    return counts[name] if name in counts else float(batch.columns[name].double().sum())


class _PlainLabels(LabelTokens):
    """Label tokens without hidden states."""

    def __init__(self, leaf: Tensor, values_by_sample: Sequence[tuple[Tensor, ...]], batch: SimpleNamespace) -> None:
        is_correct, ids = (torch.cat([parts[place] for parts in values_by_sample]) for place in (1, 2))
        batch.label_ids, batch.label_rows = ids, torch.arange(len(ids), device=ids.device)
        losses = TokenLosses(-leaf, is_correct)
        head: Any = SimpleNamespace(
            token_losses=lambda rows, ids: losses,
            cross_entropy=lambda rows, ids: LossSums(-leaf.sum(), is_correct.sum()),
        )
        super().__init__(leaf[:, None], batch, head)
        del self.states

    def __getattr__(self, name: str) -> Any:
        if name == "states":
            raise UsageError("verify proves objectives over log-probabilities; this one reads hidden states")
        raise AttributeError(name)

    @property
    def hidden_states(self) -> Tensor:
        """Unused by a head that knows its losses."""
        rows: Tensor = self.batch.label_rows
        return rows
