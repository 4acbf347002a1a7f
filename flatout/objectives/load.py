"""Make the objective that the settings name; a person's own file is run as code."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any, get_args

from flatout.config.data import Format
from flatout.config.objective import ObjectiveConfig, class_of_kind
from flatout.config.own_code import OwnCode
from flatout.errors import OF_OWN_CODE, UsageError
from flatout.objectives.protocol import COUNTED, Metric, Objective


def load_objective(config: ObjectiveConfig) -> Objective:
    """Return the objective of these settings. Raises UsageError for a file or class that cannot be used."""
    if config.path is None:
        return class_of_kind(config.kind).of(config.fields)
    own = OwnCode.read(config.path, "objective.path", "objective")
    kind, name, file = own.load(), own.name, own.path
    if not (isinstance(kind, type) and issubclass(kind, Objective)):
        what = "has no such class" if kind is None else "it is not a subclass of flatout.Objective"
        raise UsageError(f"objective.path: {config.path}: {what}; define class {name}(flatout.Objective) in {file}")
    if kind.__init__ is not Objective.__init__:
        raise UsageError(
            f"{config.path}: it has an __init__; write settings as fields instead, such as beta: float = 0.1"
        )
    try:
        objective = kind.of(config.fields)
        # with its settings, as variables of a class may be properties that depend on them
        wrong = next(chain(_wrong_variables(objective), _wrong_metrics(objective)), None)
    except OF_OWN_CODE as error:
        why = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{config.path}: {why}") from error
    if wrong is not None:
        what, value, expected = wrong
        raise UsageError(f"{config.path}: {what} is {value!r:.100}; expected {expected}")
    objective._source = own.digest
    return objective


def _wrong_variables(objective: Objective) -> Iterator[tuple[str, Any, str]]:
    if not (isinstance(objective.name, str) and objective.name):
        yield "name", objective.name, "a text"
    if objective.reads not in ("labels", "scores"):
        yield "reads", objective.reads, "labels or scores"
    if objective.row_format not in (None, *(formats := get_args(Format))):
        yield "row_format", objective.row_format, f"None, or one of {', '.join(formats)}"
    if objective.scope not in ("token", "sample", "unit"):
        yield "scope", objective.scope, "token, sample or unit"
    if objective.reads == "scores" and objective.scope == "token":
        yield "scope", objective.scope, "sample or unit, as reads is 'scores' and a sample has one"
    for name, example in (("columns", "weight"), ("estimates", "kl")):
        value: Any = getattr(objective, name)
        if not (isinstance(value, tuple) and all(isinstance(item, str) for item in value)):
            yield name, value, f"a tuple of names, such as ({example!r},)"
    if objective.scope == "unit" and not (type(objective.unit_size) is int and objective.unit_size > 0):
        yield "unit_size", objective.unit_size, "the number of samples of a unit, such as 2, as scope is 'unit'"
    for name in sorted({"kind", "path", "reference"} & set(type(objective).model_fields)):
        yield "the name of a field", name, f"another, as objective.{name} is a setting of flatout's"


def _wrong_metrics(objective: Objective) -> Iterator[tuple[str, Any, str]]:
    counts = (*COUNTED, *objective.needed_columns)
    one_of = f"one of {', '.join(counts)}, or one of `columns`"
    if objective.normalizer not in counts:
        yield "normalizer", objective.normalizer, one_of
    metrics: Any = objective.metrics
    if not (isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics)):
        yield "metrics", metrics, "a mapping of names to flatout.Metric, such as {'margins': Metric()}"
        return
    sums = {name for name, metric in metrics.items() if isinstance(metric, Metric) and metric.difference is None}
    for name, metric in metrics.items():
        if (wrong := _wrong_metric(metric, counts, one_of, sums)) is not None:
            where, value, expected = wrong
            yield f"metrics[{name!r}]{where}", value, expected
    if "loss" in metrics:
        yield "metrics", "loss", "the other sums only"


def _wrong_metric(
    metric: Any, counts: Collection[str], one_of: str, sums: Collection[str]
) -> tuple[str, Any, str] | None:
    """Return the field of a metric that is wrong, its value and what is expected."""
    if not isinstance(metric, Metric):
        return "", metric, "a flatout.Metric, such as Metric('lower')"
    if metric.better not in ("higher", "lower"):
        return ".better", metric.better, "higher or lower"
    if metric.reduce not in ("sum", "max"):
        return ".reduce", metric.reduce, "sum or max"
    if metric.reduce == "max" and (divided := metric.per or metric.difference):
        return "", divided, "neither per nor difference, as reduce is 'max'"
    if metric.per is not None and metric.per not in counts:
        return ".per", metric.per, one_of
    pair: Any = metric.difference
    is_two = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(name, str) and name in sums for name in pair)
    if not (pair is None or is_two):
        return ".difference", metric.difference, f"two of the metrics {', '.join(sorted(sums))}"
    return None
