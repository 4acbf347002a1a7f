"""What an objective reads of a micro-batch: log-probabilities of label tokens by sample, or scores of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flatout.errors import UsageError


class LossSums(NamedTuple):
    """Sums, not means, over one micro-batch's rows: the caller divides once, by the step's global normalizer.

    `loss_sum` 0-d fp32 (fp64 in fp64) with its graph; `num_correct` 0-d int64, tokens whose argmax is right.
    """

    loss_sum: Tensor
    num_correct: Tensor


class RegularizedSums(NamedTuple):
    """`LossSums` of a loss with label smoothing or z-loss, and the sum of the plain cross-entropy, without a graph."""

    loss_sum: Tensor
    plain_sum: Tensor
    num_correct: Tensor


class TokenLosses(NamedTuple):
    """Cross-entropy (L,) fp32 (fp64 in fp64) of each row, with its graph, and whether its argmax is right (L,).

    `entropies` (L,) in nats have no graph; empty if nobody asked for them.
    """

    losses: Tensor
    is_correct: Tensor
    entropies: Tensor


def target_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Return -log softmax(logits)[id] of each row of `logits` (L, V) for `ids` (L,): log(1 + sum of the others / own).

    Unlike -log p, it and its gradient keep all digits where p is close to 1.
    """
    picked = ids[:, None]
    others = (logits - logits.gather(-1, picked)).scatter(-1, picked, -torch.inf).logsumexp(-1)
    return others.logaddexp(others.new_zeros(()))


Batch: TypeAlias = Any
"""A `models.packed.PackedBatch`, of which label rows, samples, units and columns are read."""
Head: TypeAlias = Any
"""A `models.token_head.TokenHead`, whose `cross_entropy`, `token_losses`, `entropy` and `summed` are called."""


class LossInputs:
    """What every objective can read of a micro-batch with S samples of U units: their columns, and values by unit.

    `scope` is that of the objective, which may not sum over more.
    """

    scope: str = "unit"
    estimates: Mapping[str, Tensor] = MappingProxyType({})
    """The means that `Objective.estimates` names, without dimensions, fp64, without gradient."""
    kept_losses: Tensor | None = None
    """The cross-entropy of each label token (L,), if the objective has computed it."""
    example_losses: Tensor | None = None
    """What an objective may set: the loss of each unit as `by_unit` has them (U,), or by scope `sample` of each sample
    (S,). Evaluations name the units with the greatest."""

    states: Tensor
    """The last hidden states (T, D)."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def column(self, name: str) -> Tensor:
        """Return a column that the objective needs: at label tokens (L,), of samples (S,) or of units (U,)."""
        if name not in self.batch.columns:
            raise UsageError(f"the objective reads the column {name!r}, which its `columns` do not list; add it there")
        return self.batch.columns[name]

    def by_unit(self, values: Tensor) -> Tensor:
        """Return values of samples (S,) as (U, n), n = `Objective.unit_size`, in the order of the data set."""
        self._require("unit")
        order = self.batch.sample_units.argsort(stable=True)
        return values[order].view(self.batch.num_units, -1)

    def nothing(self) -> Tensor:
        """Return 0, attached to every weight that a loss reaches: the loss of a batch without labels."""
        raise NotImplementedError

    def _require(self, *scopes: str) -> None:
        if self.scope not in scopes:
            raise UsageError(
                f"the objective sums over each {scopes[0]}, but its scope is {self.scope!r}, with which ranks may "
                f"hold a part of one: set scope = {scopes[0]!r}"
            )


class SampleScores(LossInputs):
    """The scores of a micro-batch's S samples, as an objective reads them that `reads` scores.

    `states` (T, D) are hidden states; `head` maps rows of them to K scores, in fp32 (fp64 in fp64).
    """

    def __init__(self, states: Tensor, batch: Batch, head: Callable[[Tensor], Tensor]) -> None:
        super().__init__(batch)
        self.states, self.head = states, head

    @cached_property
    def scores(self) -> Tensor:
        """The scores (S, K) of each sample's last token, with their graph."""
        return self.head(self.states.index_select(0, self.batch.last_rows))

    def cross_entropy(self, labels: Tensor) -> Tensor:
        """Return -log softmax(scores)[label] (S,) for labels int64 (S,), as `target_losses` does."""
        return target_losses(self.scores, labels)

    def nothing(self) -> Tensor:
        """See LossInputs."""
        return self.head(self.states[:0]).sum()


class LabelTokens(LossInputs):
    """The L label tokens of a micro-batch with S samples of U units, as an objective reads them.

    Everything is computed on first use. `states` (T, D), `batch` and `head` are the lower door, for losses that need
    more than log-probabilities of labels.
    """

    def __init__(self, states: Tensor, batch: Batch, head: Head) -> None:
        super().__init__(batch)
        self.states, self.head = states, head
        # an evaluation reads the losses of tokens too
        self.keeps_losses = False
        # by temperature
        self._losses: dict[float, TokenLosses] = {}
        self._logprobs: dict[float, Tensor] = {}

    @cached_property
    def hidden_states(self) -> Tensor:
        """The hidden states (L, D) that predict the label tokens."""
        return self.states.index_select(0, self.batch.label_rows)

    @property
    def token_ids(self) -> Tensor:
        """The label tokens, int64 (L,)."""
        return self.batch.label_ids

    def _losses_at(self, temperature: float, *, with_entropy: bool = False) -> TokenLosses:
        if temperature not in self._losses:
            if not 0 < temperature < math.inf:
                raise UsageError(
                    f"the objective reads log-probabilities at temperature {temperature}; it must be over 0"
                )
            at = (self.hidden_states, self.token_ids, temperature)
            self._losses[temperature] = self.head.token_losses(*at, with_entropy=with_entropy)
            if temperature == 1:
                self.kept_losses = self._losses[temperature].losses
        return self._losses[temperature]

    @property
    def logprobs(self) -> Tensor:
        """The log-probability of each label token, (L,) fp32 (fp64 in fp64), with its graph."""
        return self.logprobs_at(1.0)

    def logprobs_at(self, temperature: float) -> Tensor:
        """Return log softmax(logits / temperature) of each label token, as `logprobs`, which is that at 1.

        Logits are divided after their scale and soft-cap. One pass of the head for each temperature. Raises UsageError
        for a temperature that is not over 0.
        """
        if temperature not in self._logprobs:
            self._logprobs[temperature] = -self._losses_at(temperature).losses
        return self._logprobs[temperature]

    def entropy_at(self, temperature: float, *, with_graph: bool = False) -> Tensor:
        """Return the entropy in nats of softmax(logits / temperature) at each label token, (L,) fp32 (fp64 in fp64).

        Read before `logprobs_at`, it comes of the same pass of the head. Without its graph it is a metric. With it, for
        an entropy term, it takes a pass of its own, and another one in the backward pass.
        """
        if with_graph:
            entropies: Tensor = self.head.entropy(self.hidden_states, temperature)
            return entropies
        losses = self._losses_at(temperature, with_entropy=True)
        if len(losses.entropies) == len(losses.losses):
            return losses.entropies
        with torch.no_grad():
            again: TokenLosses = self.head.token_losses(
                self.hidden_states, self.token_ids, temperature, with_entropy=True
            )
        self._losses[temperature] = losses._replace(entropies=again.entropies)
        return again.entropies

    @property
    def entropy(self) -> Tensor:
        """Return `entropy_at(1)`, without a graph."""
        return self.entropy_at(1.0)

    @property
    def is_correct(self) -> Tensor:
        """Whether each label token is the likeliest one, bool (L,)."""
        # the same at all temperatures
        losses = next(iter(self._losses.values()), None) or self._losses_at(1.0)
        return losses.is_correct

    def cross_entropy(self) -> LossSums:
        """Return the sum of -logprobs and that of is_correct; also a trained head takes one pass for it."""
        sums: LossSums = (
            self.head.summed(self._losses_at(1.0))
            if self.keeps_losses
            else self.head.cross_entropy(self.hidden_states, self.token_ids)
        )
        return sums

    def regularized_cross_entropy(self, label_smoothing: float, z_loss: float) -> RegularizedSums:
        """Return `cross_entropy` with label smoothing and z-loss; without gradients, as in evaluations, with neither.

        See `objectives.cross_entropy.CrossEntropy`.
        """
        if not torch.is_grad_enabled():
            loss_sum, num_correct = self.cross_entropy()
            return RegularizedSums(loss_sum, loss_sum, num_correct)
        sums: RegularizedSums = self.head.regularized_cross_entropy(
            self.hidden_states, self.token_ids, label_smoothing, z_loss
        )
        return sums

    def nothing(self) -> Tensor:
        """See LossInputs."""
        return self.cross_entropy().loss_sum

    @cached_property
    def sample_lengths(self) -> Tensor:
        """The number of label tokens of each sample, int64 (S,)."""
        return self.by_sample(torch.ones_like(self.batch.label_samples))

    def by_sample(self, values: Tensor) -> Tensor:
        """Return the sums over each sample (S,) of values at label tokens (L,), reproducible to the bit."""
        self._require("sample", "unit")
        if not values.is_floating_point():  # exact in any order
            return values.new_zeros(self.batch.num_samples).index_add(0, self.batch.label_samples, values)
        # label tokens are in the order of their samples; index_add would add them in any order on a GPU
        return torch.segment_reduce(values, "sum", lengths=self.sample_lengths, unsafe=True, initial=0)
