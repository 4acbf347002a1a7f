"""What a step's sums are divided by: numbers that the plan knows before step 0, so that ranks need no collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.config.objective import OBJECTIVES, class_of_kind
from flatout.data.token_store import TokenStore
from flatout.errors import DataError, Fix
from flatout.objectives.protocol import Objective
from flatout.planner.steps.step_plan import StepPlan

# samples whose columns are summed at a time
_CHUNK = 10_000


@dataclass(frozen=True, slots=True)
class Normalizers:
    """Of each of an objective's sums, the name of what it is divided by, and what each sample adds to these.

    `per` is in the order of `Objective.sum_names`. `values` has float64 (num_samples,) by name; a step counts its label
    tokens itself.
    """

    objective: Objective
    per: tuple[str, ...]
    values: Mapping[str, NDArray[np.float64]]

    def step_normalizers(self, step: StepPlan) -> list[float]:
        """Return what each sum of a step is divided by, the loss first."""
        counts = {name: self._count(name, step) for name in dict.fromkeys(self.per)}
        return [counts[name] for name in self.per]

    def loss_normalizer(self, step: StepPlan) -> float:
        """Return what the loss of a step is divided by."""
        return self._count(self.per[0], step)

    def _count(self, name: str, step: StepPlan) -> float:
        if name == "labels":
            return step.num_label_tokens
        return float(self.values[name][list(step.sample_ids)].sum())

    def means(self, values: Sequence[float], step: StepPlan) -> tuple[float, dict[str, float]]:
        """Return the step's loss, and its metrics by name without those that have nothing to divide by."""
        metrics = self.objective.means(values, self.step_normalizers(step))
        return metrics.pop("loss"), metrics


def make_normalizers(objective: Objective, store: TokenStore) -> Normalizers:
    """Count what an objective's sums are divided by.

    Raises DataError for values that are negative, or all 0, for units of another size than the objective takes, for
    samples of units without labels, and for answers to avoid that it would learn.
    """
    if objective.scope == "unit":
        _require_units(objective, store)
    elif objective.scope == "token" and not objective.columns:
        _require_good_answers(objective, store)
    metrics = [objective.metrics[name] for name in objective.sum_names[1:]]
    per = (objective.normalizer, *(metric.per or objective.normalizer for metric in metrics))
    values = {name: _values_of(name, store) for name in dict.fromkeys(per) if name != "labels"}
    for name, amounts in values.items():
        if (amounts < 0).any():
            index = int(np.flatnonzero(amounts < 0)[0])
            raise DataError(
                f"{store.origin(index)}: column {name} adds {amounts[index]:g}, but objective {objective.name} divides "
                "by its sum; give values of at least 0"
            )
        if name == objective.normalizer and not amounts.any():
            raise DataError(f"{store.folder}: {name} is 0 for every sample: objective {objective.name} learns nothing")
    return Normalizers(objective, per, values)


_A_PAIR = '{"prompt": ..., "chosen": ..., "rejected": ...}'
_ONE_ANSWER = Fix({"objective": "cross_entropy"}, "for rows of one answer")


def _require_units(objective: Objective, store: TokenStore) -> None:
    offsets = store.unit_offsets
    sizes = np.ones(store.num_samples, np.int64) if offsets is None else np.diff(offsets)
    if (wrong := np.flatnonzero(sizes != objective.unit_size)).size:
        first = int(wrong[0] if offsets is None else offsets[wrong[0]])
        if objective.unit_size == 2 and (sizes[wrong] == 1).all():
            raise DataError(
                f"{store.origin(first)}: objective {objective.name} needs a chosen and a rejected answer in each row; "
                f"{wrong.size:,} of {sizes.size:,} have one answer; write rows such as {_A_PAIR}",
                [_ONE_ANSWER],
            )
        raise DataError(
            f"{store.origin(first)}: a unit of {sizes[wrong[0]]}, but objective {objective.name} takes units of "
            f"{objective.unit_size}; {wrong.size:,} of {sizes.size:,} units of the data set have another size: "
            f"build it {'from rows of chosen and rejected answers' if objective.unit_size == 2 else 'with such units'}",
            [_ONE_ANSWER] if objective.unit_size == 2 else [],
        )
    if (empty := np.flatnonzero(np.asarray(store.num_label_tokens) == 0)).size:
        raise DataError(
            f"{store.origin(int(empty[0]))}: sample {int(empty[0])} has no label token, so objective {objective.name} "
            f"has nothing of it to compare; {empty.size:,} of {store.num_samples:,} samples have none"
        )


def _require_good_answers(objective: Objective, store: TokenStore) -> None:
    """Raise DataError for a set with answers to avoid, which an objective that sees only tokens would learn."""
    counts, name = store.meta.counts, store.meta.name
    if num_pairs := counts.get("pairs", 0):
        kinds = [kind for kind in OBJECTIVES if class_of_kind(kind).unit_size == 2]
        chosen = "build it with columns={completion: chosen}, or of conversations {messages: chosen}"
        raise DataError(
            f"data set {name!r} has {num_pairs:,} pairs; objective {objective.name} would learn rejected answers, too",
            [Fix({"objective": kinds[0]}, f"or {', '.join(kinds[1:])}"), Fix({}, chosen)],
        )
    if store.meta.labels:
        raise DataError(
            f"data set {name!r} has texts with labels, of which objective {objective.name} would learn the last token",
            [Fix({"objective": "classify"})],
        )
    num_bad = int((store.extra["label"] == 0).sum()) if counts.get("labelled") else 0
    if num_bad:
        kinds = [kind for kind in OBJECTIVES if "label" in class_of_kind(kind).columns]
        raise DataError(
            f"data set {name!r} has {num_bad:,} answers whose label is 0, and objective {objective.name} would learn "
            f"them; {'' if kinds else 'take a loss of labelled answers, '}or build it from other rows",
            [Fix({"objective": kind}) for kind in kinds],
        )


def _values_of(name: str, store: TokenStore) -> NDArray[np.float64]:
    if name == "samples":
        return np.ones(store.num_samples)
    starts_unit = np.diff(store.units_of(np.arange(store.num_samples)), prepend=-1) > 0
    if name == "units":
        return starts_unit.astype(np.float64)
    column, stored = store.columns[name], store.extra[name]
    if column.per == "sample":
        return np.asarray(stored, np.float64)
    if column.per == "unit":
        sample_values = np.zeros(store.num_samples)
        sample_values[starts_unit] = stored
        return sample_values
    sample_values = np.empty(store.num_samples)
    for first in range(0, store.num_samples, _CHUNK):
        bounds = store.offsets[first : first + _CHUNK + 1]
        tokens = slice(int(bounds[0]), int(bounds[-1]))
        is_label = np.array(store.loss_mask[tokens])
        is_label[bounds[:-1] - bounds[0]] = False  # a first token is never predicted
        label_values = np.where(is_label, stored[tokens], 0).astype(np.float64)
        sample_values[first : first + _CHUNK] = np.add.reduceat(label_values, bounds[:-1] - bounds[0])
    return sample_values
