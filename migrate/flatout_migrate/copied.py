"""Functions of a script, copied into a file of their own with what they use: rewards run apart from the training."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Iterator

from flatout_migrate.script import Script
from flatout_migrate.translation import RefusedError

# what a reward's process has not, as only the original training needs it
_NOT_THERE = re.compile(r"(?:from|import) (?P<package>unsloth|trl|vllm)\b")
_TRAINS = re.compile(r"\b(\w*Trainer|Fast\w*Model\.\w+|get_peft_model|\w+For\w+\.from_pretrained|\w+\.train)\(")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)


class Copied:
    """The statements of a script that functions need: definitions, imports, constants, and what changes these."""

    def __init__(self, script: Script) -> None:
        self.script, self._made, self._names = script, list[str](), set[str]()
        # each statement with the names that it binds or changes, and whether it is copied
        self._statements = [(one, {*_bound(one), *_changed(one)}) for one in _top_level(script.body)]
        self._kept = [False] * len(self._statements)

    def keep(self, name: str, user: str = "") -> None:
        """Copy what binds a name at the top of the file, and all that this needs. Raises RefusedError."""
        if name in self._names:
            return
        self._names.add(name)
        places = [place for place, (_, bound) in enumerate(self._statements) if name in bound]
        if not user and not places:
            raise RefusedError(f"{name} is not defined at the top of the file; move it there")
        for place in places:
            statement, _ = self._statements[place]
            where, text = f"{f'{user} uses ' * bool(user)}{name}, line {statement.lineno}", ast.unparse(statement)
            if isinstance(statement, _IMPORTS) and (package := _NOT_THERE.match(text)):
                raise RefusedError(f"{where}: it comes from {package[1]}, which is not there when a reward runs")
            if not isinstance(statement, _SCOPES) and _TRAINS.search(text):
                raise RefusedError(
                    f"{where}: it comes from the training, and rewards run apart; write a constant there"
                )
            self._kept[place] = True
            for needed in _read(statement):
                self.keep(needed, user or name)

    def keep_rows(self, function: ast.expr, *, is_whole: bool) -> str:
        """Add a converter of rows from the function of `dataset.map`; return its name. `is_whole`: other columns leave.

        Raises RefusedError for a function that needs more than the row and the top of the file.
        """
        own = {*_bound(function)} | {name.arg for name in ast.walk(function) if isinstance(name, ast.arg)}
        for name in {*_read(function)} - own - {*vars(builtins)}:
            self.keep(name)
        made = f"({ast.unparse(function)})(row)"
        self._made.append(f"def rows(row):\n    return {made if is_whole else f'{{**row, **{made}}}'}")
        return "rows"

    def text(self) -> str:
        """Return the file, "" for nothing."""
        parts = [self._text_of(one) for (one, _), kept in zip(self._statements, self._kept, strict=True) if kept]
        body = "\n".join([*parts, *(f"\n\n{one}\n" for one in self._made)]).replace("\n" * 5, "\n" * 3).strip("\n")
        about = f'"""Copied from {self.script.file.name} with what they use; the file itself would train."""'
        return f"{about}\n\n{body}\n" if body else ""

    def _text_of(self, statement: ast.stmt) -> str:
        lines = self.script.text.splitlines()
        if isinstance(statement, _IMPORTS):
            statement.names = [one for one in statement.names if {*_bound(one)} & self._names]
        elif hasattr(statement, "body"):
            start = min(one.lineno for one in (statement, *getattr(statement, "decorator_list", ())))
            text = textwrap.dedent("\n".join(lines[start - 1 : statement.end_lineno]))
            return f"\n\n{text}\n\n"
        else:
            return ast.get_source_segment(self.script.text, statement) or ""
        return ast.unparse(statement)


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for one in body:
        is_main = isinstance(one, ast.If) and ast.unparse(one.test).startswith("__name__ ==")
        yield from _top_level(one.body) if isinstance(one, ast.If) and is_main else [one]


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement or expression binds, without those in functions and classes of it."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0]
    elif isinstance(node, _SCOPES):
        yield node.name
    for part in () if isinstance(node, _SCOPES) else ast.iter_child_nodes(node):
        yield from _bound(part)


def _changed(node: ast.stmt) -> Iterator[str]:
    """Yield the name of which a statement calls a method, or sets an entry or attribute."""
    match node:
        case (
            ast.Expr(value=ast.Call(func=ast.Attribute(value=changed)))
            | ast.Assign(targets=[ast.Subscript(value=changed) | ast.Attribute(value=changed)])
        ):
            yield ast.unparse(changed).partition(".")[0]


def _read(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load):
            yield one.id
        elif isinstance(one, ast.Global):
            yield from one.names
