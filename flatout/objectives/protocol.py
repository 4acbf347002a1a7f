"""What a loss declares, so that a run is planned before it is computed, and what it computes of a micro-batch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import PrivateAttr, ValidationError

from flatout.config.data import Format
from flatout.config.objective import ANSWERS, MOVING, NO_MOVING, REFERENCE, REFERENCE_TOKENS
from flatout.config.optim import LR_OF_METHOD
from flatout.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

# normalizers that every plan knows; another is a column that the objective needs
COUNTED = ("labels", "samples", "units")


class Metric(NamedTuple):
    """A sum, or a maximum, that an objective returns beside its loss.

    `better` says which values are best, for `eval.best`. The metric is the sum divided by the count of `per` (as
    `Objective.normalizer`); None: by what the loss is divided by. With `difference`, it is no sum, but one other metric
    less a second one. With `reduce` max, it is the largest value of all micro-batches and ranks, divided by nothing.
    """

    better: Literal["higher", "lower"] = "higher"
    per: str | None = None
    difference: tuple[str, str] | None = None
    reduce: Literal["sum", "max"] = "sum"


class Objective(Section):
    """A loss over log-probabilities or scores. Its fields are settings: typed, frozen, unknown ones refused.

    Subclass it, declare the class variables below, and return sums from `__call__`. A step's gradient is that of
    sum(loss) / sum(normalizer) over all micro-batches and ranks: it does not depend on how the step is split.
    """

    name: ClassVar[str] = ""
    """What records, messages and checkpoints call it; by default, the name of the class."""
    reads: ClassVar[Literal["labels", "scores"]] = "labels"
    """labels: log-probabilities of label tokens; scores: those that a trained `score` gives each sample's last token,
    as transformers' sequence classification does. No logits over the vocabulary are computed for scores."""
    row_format: ClassVar[Format | None] = None
    """The format of rows whose sources name none; None: the one that the first row shows."""
    scope: ClassVar[Literal["token", "sample", "unit"]] = "token"
    """The most that one term of the sum reads: a token, all label tokens of a sample, or all samples of a unit."""
    unit_size: ClassVar[int | None] = None
    """The number of samples of every unit, which an objective over units must say."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Columns of the data set that it reads."""
    normalizer: ClassVar[str] = "labels"
    """What the loss is divided by: the step's number of labels, samples or units, or the sum of a column it needs."""
    metrics: ClassVar[Mapping[str, Metric]] = {}
    """The sums and maxima besides `loss`, by name."""
    usual_lr: ClassVar[Mapping[str, float]] = LR_OF_METHOD
    """The learning rate by method: for the weights what papers and their code take, for adapters ten times as much."""
    estimates: ClassVar[tuple[str, ...]] = ()
    """Means, by name, over the step's KL pairs (prompts with the answers to other ones), known before its gradients."""

    # hash of the file that a person's own class is from
    _source: str = PrivateAttr("")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the objective with these fields. Raises ValueError with every problem, in one sentence each."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ValueError("; ".join(cls._describe(item) for item in error.errors(include_url=False))) from error

    @classmethod
    def _describe(cls, item: Any) -> str:
        name, fields = ".".join(map(str, item["loc"])), list(cls.model_fields)
        if name in MOVING:
            return f"objective.{name}: {NO_MOVING}"
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            if not fields:
                return f"objective.{name}: {cls.name} has no fields"
            known = f"did you mean {near[0]}?" if near else f"its fields are {', '.join(fields)}"
            return f"objective.{name}: {cls.name} has no such field; {known}"
        if item["type"] == "missing":
            return f"objective.{name}: missing; {cls.name} needs it"
        if item["type"] == "frozen_instance":
            return f"objective.{name}: cannot be set by the loss, which has fields and keeps no state"
        message = str(item["msg"]).removeprefix("Value error, ")
        if not name:  # of several fields
            return message
        return f"objective.{name}: {message[:1].lower()}{message[1:]}, got {item['input']!r:.100}"

    @property
    def sum_names(self) -> tuple[str, ...]:
        """The names of all sums, the loss first."""
        return ("loss", *self._reduced_by("sum"))

    @property
    def value_names(self) -> tuple[str, ...]:
        """The names of what `__call__` returns: `sum_names`, and then those of maxima."""
        return (*self.sum_names, *self._reduced_by("max"))

    def _reduced_by(self, reduce: str) -> tuple[str, ...]:
        metrics = self.metrics.items()
        return tuple(name for name, metric in metrics if metric.difference is None and metric.reduce == reduce)

    def means(self, values: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """Return the loss and the metrics by name, of values by `value_names` and what each of the sums is divided by.

        A metric with nothing to divide by, and a maximum of nothing, which is -inf, are left out.
        """
        sums, maxima = values[: len(counts)], values[len(counts) :]
        means = {name: total / count for name, total, count in zip(self.sum_names, sums, counts, strict=True) if count}
        names = self.value_names[len(counts) :]
        means |= {name: value for name, value in zip(names, maxima, strict=True) if value != -math.inf}
        for name, metric in self.metrics.items():
            if metric.difference is not None and means.keys() >= set(metric.difference):
                means[name] = means[metric.difference[0]] - means[metric.difference[1]]
        return means

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """The columns that it reads with its settings: `columns`, unless a setting asks for more."""
        return self.columns

    @property
    def reference_columns(self) -> tuple[str, ...]:
        """Those of `needed_columns` that hold log-probabilities by the reference."""
        return tuple(name for name in self.needed_columns if name in (REFERENCE, REFERENCE_TOKENS))

    @property
    def batch_columns(self) -> tuple[str, ...] | None:
        """The columns that batches carry, beside the sample and unit of each label token; None: neither."""
        return self.needed_columns if self.needed_columns or self.scope != "token" else None

    @property
    def identity(self) -> dict[str, Any]:
        """What tells it from others: name, fields, and the hash of a person's own file."""
        return {"name": self.name, "settings": self.model_dump(mode="json"), "source": self._source}

    @property
    def line(self) -> str:
        fields = ", ".join(f"{name} {value}" for name, value in self.model_dump(mode="json", exclude_none=True).items())
        names = {"labels": "label token", "samples": "sample", "units": "unit", ANSWERS: "answer"}
        per = names.get(self.normalizer, self.normalizer)
        return f"{self.name}{f' ({fields})' if fields else ''}, per {per}"

    def notes(self, totals: Mapping[str, float]) -> Iterable[str]:
        """Return what to tell of a data set before step 0; `totals` are its normalizers by name."""
        return ()

    def estimate(self, tokens: Any) -> Mapping[str, Tensor]:
        """Return what `estimates` names, as sums over a micro-batch of KL pairs.

        Of columns it may read that of the reference. `tokens.estimates` then has the means over the step and all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} has no estimate")

    def __call__(self, inputs: Any) -> Mapping[str, Tensor]:
        """Return the sums and maxima over a micro-batch by name, without dimensions; only `loss` needs its graph.

        `inputs` are LabelTokens, or SampleScores for an objective that `reads` scores.
        """
        raise NotImplementedError(f"{type(self).__name__} has no __call__")
