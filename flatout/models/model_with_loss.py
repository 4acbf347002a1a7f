"""The module that a run calls and shards: a model with its objective, whose head computes label rows only."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from pydantic import ValidationError
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flatout.config.own_code import line_of
from flatout.errors import OF_OWN_CODE, FlatoutError, UsageError
from flatout.kernels.cross_entropy.tiled import DEFAULT_TILE_ROWS, ROWS_MULTIPLE, is_fused
from flatout.models.auxiliary_loss import AuxiliaryLoss
from flatout.models.blocks import hidden_states, towers
from flatout.models.compile.cuda_graphs import GraphedDecoder
from flatout.models.load.auto_class import is_scoring
from flatout.models.packed import PackedBatch, flatten_samples
from flatout.models.scoring import ScoreHead
from flatout.models.slot_cache import autocast_dtype
from flatout.models.token_head import TokenHead, head_product
from flatout.objectives.cross_entropy import CrossEntropy
from flatout.objectives.loss_inputs import LabelTokens, LossInputs, LossSums, SampleScores
from flatout.objectives.protocol import Objective


def packed_cross_entropy(
    model: PreTrainedModel,
    batch: PackedBatch,
    *,
    decoder: Callable[[PackedBatch], torch.Tensor] | None = None,
    tile_rows: int = DEFAULT_TILE_ROWS,
) -> LossSums:
    """Compute the summed cross-entropy of a packed batch, whatever a run trains; of a model that scores, its scores.

    These are the squared scores of all label rows: like cross-entropy, a loss that reaches every weight. `decoder`
    computes the last hidden states instead of `hidden_states`. Raises UsageError for a model without an output head.
    """
    states = hidden_states(model, batch) if decoder is None else decoder(batch)
    if is_scoring(model.config):
        scores = ScoreHead(model)(states.index_select(0, batch.label_rows))
        return LossSums(scores.square().sum(), torch.zeros_like(batch.label_rows).sum())
    return LabelTokens(states, batch, TokenHead(model, tile_rows)).cross_entropy()


class ModelWithLoss(nn.Module):
    """A model with its objective, called for the sums of a batch: what strategies shard and training calls.

    The model's own forward would compute logits of every token; this one computes hidden states, and its head only
    what the objective reads.
    """

    def __init__(
        self, model: PreTrainedModel, *, tile_rows: int = DEFAULT_TILE_ROWS, objective: Objective | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.tile_rows = tile_rows
        self.objective = objective or CrossEntropy()
        # computes hidden states by recorded graphs; None: the model's own forward pass
        self.decoder: GraphedDecoder | None = None
        self.aux_loss = AuxiliaryLoss()
        # modules that own trained weights which read pictures, and the weights' names there; None: not looked up
        self._readers: list[tuple[nn.Module, str]] | None = None
        # reads losses in passes without gradients: of label tokens (L,), or as `LossInputs.example_losses`
        self.on_losses: Callable[[PackedBatch, torch.Tensor], None] | None = None

    def forward(
        self,
        batch: PackedBatch,
        compute: Compute | None = None,
        estimates: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> tuple[torch.Tensor, ...]:
        """Return the objective's values in the order of `value_names`; strategies find the tensors in a plain tuple.

        With `compute`, return what it does instead: strategies gather sharded weights only around this method.
        `estimates` has what `Objective.estimates` names; without it, they are 0.
        """
        try:
            return compute(self, batch) if compute else self._sums(batch, estimates)
        finally:
            # a pass that ran out of memory is repeated too
            self.aux_loss.end_pass()

    def label_tokens(self, batch: PackedBatch) -> LabelTokens:
        """Return what an objective reads of a batch, computed without recorded graphs."""
        return LabelTokens(hidden_states(self.model, batch), batch, TokenHead(self.model, self.tile_rows))

    def _sums(self, batch: PackedBatch, estimates: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if batch.loss_columns is None and self.objective.batch_columns is not None:
            # documents that check or warm up layers; they are no samples
            return packed_cross_entropy(self.model, batch, decoder=self.decoder, tile_rows=self.tile_rows)
        states = self._states(batch) if self.decoder is None else self.decoder(batch)
        inputs: SampleScores | LabelTokens
        if self.objective.reads == "scores":
            inputs = SampleScores(states, batch, ScoreHead(self.model))
        else:
            inputs = LabelTokens(states, batch, TokenHead(self.model, self.tile_rows))
            inputs.keeps_losses = self.on_losses is not None and batch.num_label_tokens > 0
        # layers are measured and warmed up without them
        names = self.objective.estimates
        inputs.estimates = estimates or {name: states.new_zeros((), dtype=torch.float64) for name in names}
        loss_sum, *others = sums_of(self.objective, inputs)
        losses = inputs.kept_losses if self.objective.scope == "token" else inputs.example_losses
        if self.on_losses and losses is not None:
            self.on_losses(batch, losses)
        if torch.is_grad_enabled():
            loss_sum = self.aux_loss.add(loss_sum, self.model, batch)
        return loss_sum, *others

    def _states(self, batch: PackedBatch) -> torch.Tensor:
        """Return a batch's last hidden states; without pictures, what reads them gets a gradient of zero.

        Ranks that sum gradients in each pass must sum the same ones in the same order, also where one has no picture.
        """
        reads_none = torch.is_grad_enabled() and batch.pictures is not None and not batch.pictures
        if reads_none and self._readers is None:
            names = [name.rpartition(".") for name, parameter in towers(self.model).items() if parameter.requires_grad]
            self._readers = [(self.model.get_submodule(path), leaf) for path, _, leaf in names]
        if not (reads_none and self._readers):
            return hidden_states(self.model, batch)
        # read anew in each pass, as sharding puts other tensors in the modules
        weights = [getattr(module, leaf) for module, leaf in self._readers]
        zero = sum(weight.flatten()[:0].sum() for weight in weights)
        embedding = self.model.get_input_embeddings()
        with embedding.register_forward_hook(lambda _, args, embedded: embedded + zero):
            return hidden_states(self.model, batch)


Compute = Callable[[ModelWithLoss, PackedBatch], tuple[torch.Tensor, ...]]
"""What a pass computes of a batch in place of the objective's sums."""


def observe_layers(loss: ModelWithLoss, batch: PackedBatch) -> tuple[torch.Tensor]:
    """Let the auxiliary loss read a batch's layers, and compute no loss; return the last hidden states (T, D)."""
    states = hidden_states(loss.model, batch)
    loss.aux_loss.observe(loss.model, batch)
    return (states,)


def sums_of(objective: Objective, inputs: LossInputs, *, estimates: bool = False) -> tuple[torch.Tensor, ...]:
    """Return an objective's values over a micro-batch in the order of `value_names`; only the loss has a graph.

    With `estimates`, they are what `Objective.estimate` returns. A micro-batch without labels adds nothing. Raises
    UsageError for a wrong return, and for errors of a person's file.
    """
    names = objective.estimates if estimates else objective.value_names
    if not inputs.batch.num_label_tokens:
        # every weight that the loss reaches stays in its graph
        loss_sum = inputs.nothing()
        num_sums = len(names if estimates else objective.sum_names)
        nothing = [0.0] * (num_sums - 1) + [-math.inf] * (len(names) - num_sums)
        return loss_sum, *(loss_sum.new_full((), value) for value in nothing)
    inputs.scope = objective.scope
    try:
        sums = objective.estimate(inputs) if estimates else objective(inputs)
    except (FlatoutError, torch.OutOfMemoryError):
        raise
    except OF_OWN_CODE as error:
        file = getattr(sys.modules.get(type(objective).__module__), "__file__", None)
        if not (file and objective._source):
            raise
        where, why = f"{file}{line_of(error, Path(file))}", str(error)
        if isinstance(error, ValidationError):
            why = objective._describe(error.errors(include_url=False)[0])
        raise UsageError(f"{where}: objective {objective.name} failed with {type(error).__name__}: {why}") from error
    if (losses := inputs.example_losses) is not None:
        count = inputs.batch.num_units if objective.scope == "unit" else inputs.batch.num_samples
        if (wrong := _wrong_tensor(losses, (count,))) is not None:
            raise UsageError(
                f"objective {objective.name} set `example_losses` {wrong}; expected a tensor of shape ({count},), a "
                f"loss for each {objective.scope}"
            )
    if (wrong := _wrong_in(sums, names)) is not None:
        more = [name for name in sums if name not in names] if isinstance(sums, Mapping) else []
        declared = f"; name others in `metrics`: {more[0]!r}: Metric()" if more else ""
        raise UsageError(
            f"objective {objective.name} returned {wrong}; expected a mapping of {', '.join(names)} to tensors without "
            f"dimensions, sums or maxima over the micro-batch{declared}"
        )
    if inputs.states.requires_grad and not (estimates or sums["loss"].requires_grad):
        raise UsageError(
            f"objective {objective.name} returned a loss without a gradient; compute it from log-probabilities or "
            "scores, without detach(), item() or comparisons alone"
        )
    return tuple(sums[name] if name == "loss" else sums[name].detach() for name in names)


def _wrong_in(sums: object, names: Sequence[str]) -> str | None:
    """Return what an objective returned in place of sums with these names, in words; None if it is as expected."""
    if not isinstance(sums, Mapping):
        return f"a {type(sums).__name__}"
    if set(sums) != set(names):
        return ", ".join(map(str, sums)) or "nothing"
    wrong = {name: _wrong_tensor(value, ()) for name, value in sums.items()}
    return ", ".join(f"{name} {what}" for name, what in wrong.items() if what) or None


def _wrong_tensor(value: object, shape: tuple[int, ...]) -> str | None:
    """Say what a value is in place of a tensor of real numbers of this shape; None if it is one."""
    if not isinstance(value, torch.Tensor):
        return f"as a {type(value).__name__}"
    if tuple(value.shape) != shape:
        return f"of shape {tuple(value.shape)}"
    return "of complex numbers" if value.is_complex() else None


def next_logits(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """Return the logits after each of a batch's label rows, (L, V) fp32 (fp64 in fp64)."""
    states = hidden_states(model, batch)
    # the last layer of a model on several devices may be on another than its inputs
    rows = states.index_select(0, batch.label_rows.to(states.device))
    return TokenHead(model, len(rows)).logits(rows)


def prepare_head(model: PreTrainedModel, tile_rows: int) -> None:
    """Run the loss once for every tile size, under training's autocast, so that no step waits while kernels load.

    It leaves no gradient, and does nothing for a head that is not fused, is sharded, or is not a plain linear layer.
    """
    head = model.get_output_embeddings()
    product = head_product(head) if isinstance(head, nn.Module) else None
    if product is None or any(isinstance(parameter, DTensor) for parameter in head.parameters()):
        return
    weight = product[0]
    # a trained head's rows have the dtype of what it replaced
    dtype = getattr(head, "base", head).weight.dtype
    if not is_fused(model.device, autocast_dtype(weight.new_empty(0, dtype=dtype))):
        return
    for num_rows in range(ROWS_MULTIPLE, tile_rows + 1, ROWS_MULTIPLE):
        # a document's first token is never predicted
        document = (np.zeros(num_rows + 1, np.int64), np.ones(num_rows + 1, bool))
        states = weight.new_zeros(num_rows + 1, weight.shape[1], dtype=dtype).requires_grad_()
        batch = flatten_samples([document]).to(model.device)
        packed_cross_entropy(model, batch, decoder=lambda _, states=states: states, tile_rows=tile_rows)  # type: ignore[misc]
