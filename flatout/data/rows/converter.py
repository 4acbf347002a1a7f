"""Rows that a person's own function makes canonical: `format: FILE.py:FUNCTION`.

A function gets one row, a dict, and gives its result: a row of a format that flatout reads (a dict), a list of such
rows, or None (or a text that says why) for a row to leave out. A generator function gets an iterator over all rows
instead, and yields pairs: one of these rows, and a result for it. What either raises, and an exception that a generator
yields as a result, is what is wrong with the row.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from flatout.config.data import SourceConfig
from flatout.config.own_code import OwnCode, line_of
from flatout.data.conversation import Origin
from flatout.data.rows.read import BadRow, RawRow
from flatout.data.rows.sources import RowSource
from flatout.errors import OF_OWN_CODE, DataError, FlatoutError, UsageError, exit_refused

_NO_REASON = "without a reason"
_EXPECTED = "a row (a dict), a list of rows, or None to leave the row out"


class SourceRow(dict[str, Any]):
    """A row as a converter gets it, with where it was read."""

    __slots__ = ("classes", "origin")

    def __init__(self, row: RawRow) -> None:
        super().__init__(row.columns)
        self.origin: Origin = row.origin
        self.classes = row.classes


def converted(source: RowSource, config: SourceConfig, log: Callable[[str], None] = lambda _: None) -> RowSource:
    """Return a source with the rows that its converter makes; one without a converter stays as it is.

    The hashes of its file, and of the files beside it that it imports, are among those of the source's files, so that
    a changed converter builds the data set again.
    """
    if config.converter is None:
        return source
    code = OwnCode.read(config.converter, "format", "converter")
    log(f"{source.name}: {config.converter} converts its rows, and runs as code")
    left_out = Counter[str]()

    def read(bad_row: BadRow) -> Iterator[RawRow]:
        left_out.clear()
        num_rows = 0
        for row, result in _results(code, source.rows(bad_row)):
            if result is None or result == [] or isinstance(result, str):
                left_out[result or _NO_REASON] += 1
                continue
            try:
                made = _made(code, row, result)
            except DataError as error:
                bad_row(error)
                continue
            num_rows += len(made)
            yield from made
        if left_out and not num_rows:
            most = left_out.most_common(1)[0][0]
            raise DataError(f"{source.name}: {config.converter} left out all {left_out.total():,} rows ({most})")

    files = {**source.files, **files_of(code)}
    named = f"{code.path.name}:{code.name}"
    return replace(source, files=files, num_rows=None, read=read, is_local=False, converter=named, left_out=left_out)


def files_of(code: OwnCode) -> dict[str, str]:
    """Return the file of code, those beside it that it imports, and that these import, with their hashes; runs none."""
    digests, unread = {str(code.path): code.digest}, [(code.path.parent, code.content)]
    while unread:
        folder, content = unread.pop()
        with suppress(SyntaxError, ValueError):  # told when it runs
            for module in _modules(ast.parse(content), folder, code.path.parent):
                for file in (module.with_name(f"{module.name}.py"), module / "__init__.py"):
                    # what may not be read is no module of this code: another user's folder in /tmp
                    with suppress(OSError):
                        if str(file) not in digests and file.is_file():
                            unread.append((file.parent, file.read_bytes()))
                            digests[str(file)] = xxh3_128_hexdigest(unread[-1][1])
    return digests


def _modules(tree: ast.AST, folder: Path, root: Path) -> Iterator[Path]:
    """Yield where each module and package that code in `folder` imports would be, without `.py`."""
    for node in ast.walk(tree):
        names, start = list[str](), root
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = [root, folder, *folder.parents][node.level]
            names = [".".join(filter(None, [node.module, each.name])) for each in node.names]
        for parts in (name.split(".") for name in names):
            yield from (start.joinpath(*parts[:count]) for count in range(1, len(parts) + 1))


def _results(code: OwnCode, rows: Iterable[RawRow]) -> Iterator[tuple[SourceRow, Any]]:
    """Yield each row with what the converter gives for it: an exception of its own code stands for a bad row."""
    function = code.load()
    if not callable(function):
        what = "has no such function" if function is None else "is no function"
        raise UsageError(f"format: {code.path}:{code.name} {what}; define def {code.name}(row) in it")
    given = map(SourceRow, rows)
    if not inspect.isgeneratorfunction(function):
        for row in given:
            try:
                result = function(row)
            except OF_OWN_CODE as error:
                _require_own(error)
                result = error
            yield row, result
        return
    results = function(given)
    while True:
        try:
            pair = next(results)
        except StopIteration:
            return
        except OF_OWN_CODE as error:
            _require_own(error)
            raise DataError(f"{_place(code, error)} failed with {type(error).__name__}: {error}") from error
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], SourceRow)):
            raise DataError(f"{code.path}:{code.name} yields {pair!r:.80}; expected one of its rows, and {_EXPECTED}")
        yield pair


def _require_own(error: BaseException) -> None:
    """Raise an error again that is no mistake of a converter: flatout's own, of reading, or a signal's exit."""
    is_exit = isinstance(error, SystemExit | GeneratorExit)
    if isinstance(error, FlatoutError) or (is_exit and exit_refused(error) is None):
        raise error


def _made(code: OwnCode, source: SourceRow, result: Any) -> list[RawRow]:
    origin = source.origin
    if isinstance(result, BaseException):
        kind = "" if isinstance(result, ValueError) else f"{type(result).__name__}: "
        raise DataError(f"{origin}: {kind}{result} ({_place(code, result)})")
    made = result if isinstance(result, list) else [result]
    for row in made:
        if not isinstance(row, dict):
            raise DataError(f"{origin}: {code.path.name}:{code.name} gives {row!r:.80}; expected {_EXPECTED}")
    # columns that the converter left as they are keep the names of their classes
    classes = [{name: names for name, names in (source.classes or {}).items() if row.get(name) == source.get(name)}
               for row in made]  # fmt: skip
    return [RawRow(origin, dict(row), own or None) for row, own in zip(made, classes, strict=True)]


def _place(code: OwnCode, error: BaseException) -> str:
    return f"{code.path.name}{line_of(error, code.path.absolute())}"
