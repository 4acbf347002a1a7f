"""The reference of `flatout verify`: transformers' forward pass, PEFT's LoRA and padded rows, no code of our step.

An objective's own sums are over what plain transformers computes, one sample at a time.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from flatout.config.schema import Config
from flatout.data.pictures.read import decoded
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import new_token_ids
from flatout.errors import UsageError
from flatout.models.blocks import replace_module
from flatout.models.frozen.frozen_linear import Fp8Linear, Nf4Linear
from flatout.models.load.inference import load_for_inference
from flatout.models.load.model import Loading, load_model, resolve_precision
from flatout.models.lora.adapter import save_adapter
from flatout.models.lora.layer import lora_layers, remove_adapter, trainable_parameters
from flatout.models.lora.saved import grow_vocabulary
from flatout.models.masters import narrow_hidden_states
from flatout.models.rope import length_limits
from flatout.models.scoring import Scoring
from flatout.objectives.loss_inputs import (
    Batch,
    LabelTokens,
    LossInputs,
    LossSums,
    RegularizedSums,
    SampleScores,
    TokenLosses,
)
from flatout.objectives.protocol import Objective
from flatout.trainer.picture_inputs import PictureMaker, processor_of
from flatout.trainer.trainable import make_trainable

# scale of the random B of a fresh adapter; with B at zero, A would have no gradient
WAKE_SCALE = 0.02
# rows of logits that are in fp64 at once: 0.3 GB with a 150k vocabulary
FP64_ROWS = 256


class Sample(NamedTuple):
    """Token ids (n,), loss mask (n,), and what transformers' whole model reads of a sample with pictures."""

    token_ids: NDArray[Any]
    loss_mask: NDArray[Any]
    inputs: Mapping[str, Tensor] | None = None

    def given(self, device: torch.device) -> dict[str, Tensor]:
        """Return the arguments of transformers' model for this sample alone."""
        inputs = self.inputs or {"input_ids": torch.tensor(self.token_ids.tolist())[None]}
        return {name: values.to(device) for name, values in inputs.items()}


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A plain model and its trained parameters under flatout's names."""

    model: nn.Module
    named: dict[str, nn.Parameter]
    autocast: torch.dtype | None

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Gradients by name; zeros for parameters that the step does not reach."""
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.named.items()}

    def read(self, store: TokenStore, sample_ids: Sequence[int]) -> list[Sample]:
        """Return samples of a store; pictures are what the model's own processor makes of them."""
        pairs = [store.sample(sample_id).pair for sample_id in sample_ids]
        if not store.num_pictures:
            return [Sample(*pair) for pair in pairs]
        model: Any = self.model
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        files = [[decoded(file) for file in store.pictures(sample_id)] for sample_id in sample_ids]
        with closing(PictureMaker(processor_of(store), base)) as maker:
            return [
                Sample(*pair, maker.inputs_of(pair[0].astype(np.int64), images))
                for pair, images in zip(pairs, files, strict=True)
            ]


def plain_model(config: Config, device: torch.device, adapter: Path, scoring: Scoring | None = None) -> PlainModel:
    """Load the run's model with transformers and PEFT, in eval mode (no dropout), with its trained parameters enabled.

    With method lora the adapter is read from the folder `adapter` (PEFT's format). If it is missing, it is first
    written from the run's initial adapter, with every B that is all zeros replaced by small random values. Quantized
    layers are replaced by dense ones with the dequantized weights. Raises the same errors as `load_model`.
    """
    token_ids, num_rows = new_token_ids(config.data, config.model.name)
    model = _dense_model(config, device, num_rows, scoring).eval()
    try:
        # eager for soft-capped scores, and for models without sdpa
        capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
        model.set_attn_implementation("eager" if capped else "sdpa")
    except ValueError:
        model.set_attn_implementation("eager")
    dtype = resolve_precision(config.model.precision, device)
    if config.method == "full":
        make_trainable(model.requires_grad_(True), config, token_ids)
        return PlainModel(model, trainable_parameters(model), dtype if dtype != model.dtype else None)
    if not adapter.exists():
        _write_adapter(model, config, adapter, token_ids)
    from peft import PeftModel

    with warnings.catch_warnings():
        # PEFT uses a name that transformers has deprecated
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = PeftModel.from_pretrained(model, str(adapter), is_trainable=True).eval()
    named = {}
    for peft_name, parameter in trainable_parameters(wrapped).items():
        name = peft_name.removeprefix("base_model.model.").replace(".lora_A.default.weight", ".lora_a")
        name = name.replace(".base_layer.lora_", ".base.lora_")
        name = name.replace(".lora_B.default.weight", ".lora_b").replace(".modules_to_save.default.", ".trained.")
        name = name.replace(".token_adapter.trainable_tokens_delta.default", ".trained.rows")
        named[name.replace(".lora_magnitude_vector.default.weight", ".magnitude")] = parameter
    return PlainModel(wrapped, named, None)


def plain_step(plain: PlainModel, samples: Sequence[Sample], *, max_tokens: int = 0) -> float:
    """Return the loss of one step and accumulate its gradient: summed cross-entropy over the number of label tokens.

    Runs one sample at a time, or right-padded batches of at most `max_tokens` tokens including padding. If rope depends
    on the length of a forward pass, samples always run one at a time, with rope's state reset before each; so do those
    of a step with pictures. Raises ValueError without label tokens.
    """
    num_label_tokens = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
    if not num_label_tokens:
        raise ValueError("the step has no label token")
    plain.model.zero_grad(set_to_none=True)
    total, device = 0.0, next(plain.model.parameters()).device
    resets, has_pictures = bool(length_limits(plain.model)), any(sample.inputs for sample in samples)
    for rows in _batches(samples, 0 if resets or has_pictures else max_tokens):
        tokens = [torch.tensor(sample.token_ids.tolist(), device=device) for sample in rows]
        marks = [torch.tensor(sample.loss_mask.tolist(), device=device) for sample in rows]
        labels = [torch.where(mark, sequence, -100) for mark, sequence in zip(marks, tokens, strict=True)]
        # right-padded, int64 (B, longest)
        ids = pad_sequence(tokens, batch_first=True)
        mask = pad_sequence([torch.ones_like(sequence) for sequence in tokens], batch_first=True)
        targets = pad_sequence(labels, batch_first=True, padding_value=-100)[:, 1:].flatten()
        arguments = rows[0].given(device) if has_pictures else {"input_ids": ids, "attention_mask": mask}
        if resets:
            with torch.no_grad():
                # dynamic NTK keeps the longest length so far; a short input resets it
                plain.model(input_ids=ids[:, :1], use_cache=False)
        with torch.autocast(device.type, dtype=plain.autocast) if plain.autocast else nullcontext():
            logits = plain.model(**arguments, use_cache=False).logits[:, :-1]
        is_label = targets != -100
        loss_sum = token_losses(logits.flatten(0, 1)[is_label], targets[is_label]).sum()
        if loss_sum.requires_grad:  # texts do not reach a projector that is trained alone
            (loss_sum / num_label_tokens).backward()
        total += loss_sum.item()
    return total / num_label_tokens


def wide_dtype(plain: PlainModel) -> torch.dtype:
    """Return fp32, or fp64 for a model in fp64."""
    return torch.promote_types(next(plain.model.parameters()).dtype, torch.float32)


@torch.no_grad()
def change_last_bits(plain: PlainModel, seed: int) -> None:
    """Change every weight by at most two units in its last place, at random."""
    for parameter in plain.model.parameters():
        generator = torch.Generator(parameter.device).manual_seed(seed)
        signs = torch.empty_like(parameter).uniform_(-1, 1, generator=generator)
        parameter.addcmul_(parameter, signs, value=torch.finfo(parameter.dtype).eps)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p of the targets (N,) by their rows of `logits` (N, V), fp64: log(1 + sum of the others / own).

    Near certainty, log p and 1 - p lose all digits if they come from p. Only a few rows at a time are in fp64.
    """

    def losses(rows: Tensor, ids: Tensor) -> Tensor:
        wide, picked = rows.double(), ids[:, None]
        others = wide.scatter(-1, picked, -torch.inf).logsumexp(-1)
        return (others - wide.gather(-1, picked)[:, 0]).logaddexp(others.new_zeros(()))

    parts = zip(logits.split(FP64_ROWS), targets.split(FP64_ROWS), strict=True)
    return torch.cat([checkpoint(losses, rows, ids, use_reentrant=False) for rows, ids in parts])


def _dense_model(config: Config, device: torch.device, num_rows: int, scoring: Scoring | None) -> PreTrainedModel:
    stored = config.base.storage if config.method == "lora" else "model"
    if config.model.init == "pretrained" and stored == "model":
        dtype = resolve_precision(config.model.precision, device)
        if config.method == "full":
            dtype = torch.promote_types(dtype, torch.float32)
        model = load_for_inference(
            config.model.name, revision=config.model.revision, device=device, dtype=dtype, scoring=scoring,
            seed=config.seed,
        )  # fmt: skip
        grow_vocabulary(model, num_rows, seed=config.seed)
        narrow_hidden_states(model, config.full, resolve_precision(config.model.precision, device))
        return model
    # random and quantized weights must come from flatout's own loader
    loaded = load_model(
        config.model, method=config.method, device=device, seed=config.seed, full=config.full, base=config.base,
        how=Loading(is_padded=True, num_rows=num_rows, keep_dense=config.lora.modules_to_save, scoring=scoring),
    )  # fmt: skip
    for name, module in list(loaded.model.named_modules()):
        if not isinstance(module, Fp8Linear | Nf4Linear):
            continue
        with torch.no_grad():
            weight, bias = module.weight, module.bias
            linear = nn.Linear(module.in_features, module.out_features, bias=bias is not None, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            if bias is not None:
                linear.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=False)
        replace_module(loaded.model, name, linear)
    return loaded.model


@torch.no_grad()
def _write_adapter(model: PreTrainedModel, config: Config, folder: Path, token_ids: Sequence[int]) -> None:
    make_trainable(model, config, token_ids)
    for name, layer in lora_layers(model).items():
        if not layer.lora_b.any():
            generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:12], 16))
            layer.lora_b.copy_(WAKE_SCALE * torch.randn(layer.lora_b.shape, generator=generator))
    save_adapter(model, folder, base_name=config.model.name, config=config.lora)
    remove_adapter(model)


def _batches(samples: Sequence[Sample], max_tokens: int) -> Iterator[list[Sample]]:
    rows: list[Sample] = []
    for sample in samples:
        longest = max(len(row.token_ids) for row in (*rows, sample))
        if rows and longest * (len(rows) + 1) > max_tokens:
            yield rows
            rows = []
        rows.append(sample)
    yield rows


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
    leaves, inputs = _loss_inputs(plain, objective, store, sample_ids, dtype)
    if kl_store is not None:
        sums = objective.estimate(_loss_inputs(plain, objective, kl_store, sample_ids, dtype)[1])
        inputs.estimates = {name: value.detach().double() / len(sample_ids) for name, value in sums.items()}
    loss = objective(inputs)["loss"] / _normalizer(objective, inputs.batch)
    leaves.backward(loss)
    return float(loss.detach())


# what plain transformers computes of a sample: values that a loss may have gradients of, and more of the same length
_Compute = Callable[[PlainModel, Sample], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class _Leaves:
    """What an objective reads of a step's samples: a pass gives each kind of values, and a second one gradients."""

    plain: PlainModel
    samples: Sequence[Sample]
    dtype: torch.dtype
    read: list[tuple[_Compute, Tensor, list[int]]] = field(default_factory=list)

    def of(self, compute: _Compute) -> tuple[Tensor, ...]:
        """Return the values of all samples as a leaf, and what comes with them."""
        with torch.no_grad():
            parts = list(zip(*(compute(self.plain, sample) for sample in self.samples), strict=True))
        leaf = torch.cat(parts[0]).to(self.dtype).requires_grad_()
        self.read.append((compute, leaf, [len(values) for values in parts[0]]))
        return leaf, *map(torch.cat, parts[1:])

    def backward(self, loss: Tensor) -> None:
        """Add to the weights' gradients those of a loss over the leaves."""
        gradients = torch.autograd.grad(loss, [leaf for _, leaf, _ in self.read], allow_unused=True)
        for (compute, _, counts), gradient in zip(self.read, gradients, strict=True):
            # a metric has none
            parts = [] if gradient is None else zip(self.samples, gradient.split(counts), strict=True)
            for sample, grad in parts:
                (compute(self.plain, sample)[0] * grad).sum().backward()


def _loss_inputs(
    plain: PlainModel, objective: Objective, store: TokenStore, sample_ids: Sequence[int], dtype: torch.dtype
) -> tuple[_Leaves, LossInputs]:
    """Return what an objective reads of samples, and the leaves that it has read."""
    leaves, device = _Leaves(plain, plain.read(store, sample_ids), dtype), next(plain.model.parameters()).device
    columns = [name for name in objective.needed_columns if name in store.extra]
    if objective.reads == "scores":
        (leaf,) = leaves.of(_plain_scores)
        counts = [count for _, _, (count, *_) in leaves.read] * len(sample_ids)
        batch: Any = _gathered(columns, store, sample_ids, counts, device)
        return leaves, SampleScores(leaf.view(len(counts), -1), batch, lambda rows: rows)
    ids = [
        torch.tensor(sample.token_ids[1:][sample.loss_mask[1:]].tolist(), device=device) for sample in leaves.samples
    ]
    batch = _gathered(columns, store, sample_ids, [len(part) for part in ids], device)
    batch.label_ids, batch.label_rows = torch.cat(ids), torch.arange(sum(map(len, ids)), device=device)
    return leaves, _PlainLabels(leaves, batch)


def plain_logprobs(plain: PlainModel, sample: Sample, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) of each label token of a sample, and whether it is the likeliest."""
    logits, targets = _label_logits(plain, sample)
    return -token_losses(logits.double() / temperature if temperature != 1 else logits, targets), logits.argmax(
        -1
    ) == targets


def _plain_regularized(plain: PlainModel, sample: Sample, label_smoothing: float, z_loss: float) -> tuple[Tensor, ...]:
    """Return the loss of each label token with label smoothing and z-loss, and without, and whether it is likeliest."""
    logits, targets = _label_logits(plain, sample)
    wide = logits.double()
    smoothed = F.cross_entropy(wide, targets, label_smoothing=label_smoothing, reduction="none")
    losses = smoothed + z_loss * wide.logsumexp(-1).square()
    return losses, token_losses(logits, targets), logits.argmax(-1) == targets


def _plain_entropies(plain: PlainModel, sample: Sample, temperature: float) -> tuple[Tensor]:
    """Return the entropy of softmax(logits / temperature) at each label token of a sample, fp64."""
    logprobs = (_label_logits(plain, sample)[0].double() / temperature).log_softmax(-1)
    return (-(logprobs.exp() * logprobs.masked_fill(logprobs == -math.inf, 0.0)).sum(-1),)


def _label_logits(plain: PlainModel, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return the logits that predict the label tokens of a sample, and the label tokens."""
    device = next(plain.model.parameters()).device
    ids, mask = (torch.tensor(part.tolist(), device=device) for part in sample[:2])
    with torch.autocast(device.type, dtype=plain.autocast) if plain.autocast else nullcontext():
        logits = plain.model(**sample.given(device), use_cache=False).logits[0, :-1]
    return logits[mask[1:]], ids[1:][mask[1:]]


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

    def __init__(self, leaves: _Leaves, batch: SimpleNamespace) -> None:
        def entropy(rows: Tensor, temperature: float) -> Tensor:
            return leaves.of(partial(_plain_entropies, temperature=temperature))[0]

        def losses(rows: Tensor, ids: Tensor, temperature: float = 1.0, *, with_entropy: bool = False) -> TokenLosses:
            logprobs, is_correct = leaves.of(partial(plain_logprobs, temperature=temperature))
            entropies = entropy(rows, temperature).detach() if with_entropy else logprobs[:0].detach()
            return TokenLosses(-logprobs, is_correct, entropies)

        def cross_entropy(rows: Tensor, ids: Tensor) -> LossSums:
            token_losses, is_correct, _ = losses(rows, ids)
            return LossSums(token_losses.sum(), is_correct.sum())

        def regularized(rows: Tensor, ids: Tensor, label_smoothing: float, z_loss: float) -> RegularizedSums:
            compute = partial(_plain_regularized, label_smoothing=label_smoothing, z_loss=z_loss)
            return RegularizedSums(*(values.sum() for values in leaves.of(compute)))

        head = SimpleNamespace(
            token_losses=losses, cross_entropy=cross_entropy, entropy=entropy, regularized_cross_entropy=regularized
        )
        super().__init__(batch.label_rows, batch, head)
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
