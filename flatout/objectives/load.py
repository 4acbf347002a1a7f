"""Make the objective that the settings name; a person's own file is run as code."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from xxhash import xxh3_128_hexdigest

from flatout.config.objective import ObjectiveConfig, class_of_kind
from flatout.config.read import line_of
from flatout.errors import UsageError
from flatout.objectives.protocol import COUNTED, Objective

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
            content = opened.read(MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"objective.path: {file} cannot be read: {reason}; name a file from the folder you start in"
        ) from error
    digest = xxh3_128_hexdigest(content)
    found = getattr(_module(path.absolute(), content, digest), name, None)
    if not (isinstance(found, type) and issubclass(found, Objective)):
        what = "has no such class" if found is None else "it is not a subclass of flatout.Objective"
        raise UsageError(f"objective.path: {config.path}: {what}; define class {name}(flatout.Objective) in {file}")
    _check(found, config.path)
    try:
        objective = found.of(config.fields)
    except ValueError as error:
        raise UsageError(f"{config.path}: {error}") from error
    objective._source = digest
    return objective


class _Source(SourceLoader):
    """Runs exactly the bytes that were hashed, and leaves no bytecode beside a person's file."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content

    def get_filename(self, fullname: str) -> str:
        """See SourceLoader."""
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        """See SourceLoader."""
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
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(
            f"{path}{line_of(error, path)}: the objective's own code failed with {type(error).__name__}: {error}"
        ) from error
    return module


def _check(found: type[Objective], where: str) -> None:
    """Raise UsageError for class variables that no plan can follow."""

    def refuse(what: str, value: Any, expected: str) -> None:
        raise UsageError(f"{where}: {what} is {value!r}; expected {expected}")

    if found.couples not in ("token", "sample", "unit"):
        refuse("couples", found.couples, "token, sample or unit")
    if not (isinstance(found.needs, tuple) and all(isinstance(one, str) for one in found.needs)):
        refuse("needs", found.needs, "a tuple of names of columns, such as ('weight',)")
    per = {"normalizer": found.normalizer, **{f"figures[{name!r}].per": one.per for name, one in found.figures.items()}}
    for what, value in per.items():
        if value is not None and value not in (*COUNTED, *found.needs):
            refuse(what, value, f"one of {', '.join((*COUNTED, *found.needs))}, or a column that `needs` names")
    if "loss" in found.figures:
        refuse("figures", "loss", "the other sums only")
