"""Make the objective that the settings name; a person's own file is run as code."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from xxhash import xxh3_128_hexdigest

from flatout.config.data import Format
from flatout.config.objective import ObjectiveConfig, class_of_kind
from flatout.config.read import line_of
from flatout.errors import OF_OWN_CODE, UsageError
from flatout.objectives.protocol import COUNTED, Metric, Objective

MAX_FILE_BYTES = 1 << 20


def load_objective(config: ObjectiveConfig) -> Objective:
    """Return the objective of these settings. Raises UsageError for a file or class that cannot be used."""
    if config.path is None:
        made: Objective = class_of_kind(config.kind).of(config.fields)
        return made
    file, _, name = config.path.rpartition(":")
    path = Path(file)
    try:
        with path.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"objective.path: {file} cannot be read: {reason}; name a file from the folder you start in"
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(
            f"objective.path: {file} has more than {MAX_FILE_BYTES:,} bytes; name the file of the loss alone"
        )
    digest = xxh3_128_hexdigest(content)
    kind = getattr(_module(path.absolute(), content, digest), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Objective)):
        what = "has no such class" if kind is None else "it is not a subclass of flatout.Objective"
        raise UsageError(f"objective.path: {config.path}: {what}; define class {name}(flatout.Objective) in {file}")
    _check(kind, config.path)
    try:
        objective = kind.of(config.fields)
    except OF_OWN_CODE as error:
        why = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{config.path}: {why}") from error
    objective._source = digest
    return objective


class _Source(SourceLoader):
    """Runs exactly the bytes that were hashed, and leaves no bytecode beside a person's file."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        if str(path) != str(self._path):
            raise OSError("no bytecode")
        return self._content


@lru_cache(maxsize=8)
def _module(path: Path, content: bytes, digest: str) -> ModuleType:
    name = f"flatout_objective_{digest}"
    spec = spec_from_loader(name, _Source(path, content))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # pydantic looks up the types of fields there
    sys.modules[name] = module
    # it may import from its own folder, as a script does
    sys.path.append(folder := f"{path.parent}/")
    try:
        spec.loader.exec_module(module)
    except OF_OWN_CODE as error:
        del sys.modules[name]
        raise UsageError(
            f"{path}{line_of(error, path)}: the objective's own code failed with {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(folder)
    return module


def _check(kind: type[Objective], where: str) -> None:
    """Raise UsageError for class variables that no plan can follow."""
    if kind.__init__ is not Objective.__init__:
        raise UsageError(f"{where}: it has an __init__; write settings as fields instead, such as beta: float = 0.1")
    for what, value, expected in chain(_wrong_variables(kind), _wrong_metrics(kind)):
        raise UsageError(f"{where}: {what} is {value!r:.100}; expected {expected}")


def _wrong_variables(kind: type[Objective]) -> Iterator[tuple[str, Any, str]]:
    if not (isinstance(kind.name, str) and kind.name):
        yield "name", kind.name, "a text"
    if kind.reads not in ("labels", "scores"):
        yield "reads", kind.reads, "labels or scores"
    if kind.row_format not in (None, *(formats := get_args(Format))):
        yield "row_format", kind.row_format, f"None, or one of {', '.join(formats)}"
    if kind.scope not in ("token", "sample", "unit"):
        yield "scope", kind.scope, "token, sample or unit"
    if kind.reads == "scores" and kind.scope == "token":
        yield "scope", kind.scope, "sample or unit, as reads is 'scores' and a sample has one"
    for name, example in (("columns", "weight"), ("estimates", "kl")):
        value: Any = getattr(kind, name)
        if not (isinstance(value, tuple) and all(isinstance(item, str) for item in value)):
            yield name, value, f"a tuple of names, such as ({example!r},)"
    if kind.scope == "unit" and not (type(kind.unit_size) is int and kind.unit_size > 0):
        yield "unit_size", kind.unit_size, "the number of samples of a unit, such as 2, as scope is 'unit'"
    for name in sorted({"kind", "path", "reference"} & set(kind.model_fields)):
        yield "the name of a field", name, f"another, as objective.{name} is a setting of flatout's"


def _wrong_metrics(kind: type[Objective]) -> Iterator[tuple[str, Any, str]]:
    counts = (*COUNTED, *kind.columns)
    one_of = f"one of {', '.join(counts)}, or one of `columns`"
    if kind.normalizer not in counts:
        yield "normalizer", kind.normalizer, one_of
    metrics: Any = kind.metrics
    if not (isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics)):
        yield "metrics", metrics, "a mapping of names to flatout.Metric, such as {'margins': Metric()}"
        return
    sums = {name for name, metric in metrics.items() if isinstance(metric, Metric) and metric.difference is None}
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            yield f"metrics[{name!r}]", metric, "a flatout.Metric, such as Metric('lower')"
        elif metric.better not in ("higher", "lower"):
            yield f"metrics[{name!r}].better", metric.better, "higher or lower"
        elif metric.per is not None and metric.per not in counts:
            yield f"metrics[{name!r}].per", metric.per, one_of
        elif not (metric.difference is None or _are_two_of(sums, metric.difference)):
            yield f"metrics[{name!r}].difference", metric.difference, f"two of the metrics {', '.join(sorted(sums))}"
    if "loss" in metrics:
        yield "metrics", "loss", "the other sums only"


def _are_two_of(names: Collection[str], pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(name, str) and name in names for name in pair)
