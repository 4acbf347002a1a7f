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
_NOT_THERE = ("unsloth", "trl", "vllm")
_TRAINS = re.compile(r"\b(\w*Trainer|Fast\w*Model\.\w+|get_peft_model|\w+For\w+\.from_pretrained|\w+\.train)\(")
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_COMPOUND = (*_SCOPES.__args__, ast.If, ast.Try, ast.For, ast.With)


class Copied:
    """The statements of a script that functions need: definitions, imports, constants, and what changes these."""

    def __init__(self, script: Script) -> None:
        self.script, self._made = script, list[str]()
        self._statements = [*_top_level(script.body)]
        self._binds = [{*_bound(one)} for one in self._statements]
        self._kept, self._names = set[int](), set[str]()

    def keep(self, name: str, user: str = "") -> None:
        """Copy what binds a name at the top of the file, and all that this needs. Raises RefusedError."""
        if name in self._names:
            return
        self._names.add(name)
        places = [place for place, bound in enumerate(self._binds) if name in bound or self._changes(place, name)]
        if not user and not places:
            raise RefusedError(f"{name} is not defined at the top of the file; move it there")
        for place in places:
            statement = self._statements[place]
            where = f"{f'{user} uses ' * bool(user)}{name}, line {statement.lineno}"
            if isinstance(statement, ast.ImportFrom | ast.Import):
                self._require_import(statement, name, where)
            elif not isinstance(statement, _SCOPES) and _TRAINS.search(ast.unparse(statement)):
                raise RefusedError(
                    f"{where}: it comes from the training, and rewards run apart; write a constant there"
                )
            self._kept.add(place)
            for needed in _read(statement) if not isinstance(statement, ast.ImportFrom | ast.Import) else ():
                self.keep(needed, user or name)

    def keep_rows(self, function: ast.expr, *, is_whole: bool) -> str:
        """Add a converter of rows from the function of `dataset.map`; return its name. `is_whole`: other columns leave.

        Raises RefusedError for a function that needs more than the row and the top of the file.
        """
        if not isinstance(function, ast.Lambda | ast.Name):
            raise RefusedError("name a function, or write a lambda")
        own = {*_bound(function)} | {name.arg for name in ast.walk(function) if isinstance(name, ast.arg)}
        for name in {*_read(function)} - own - {*vars(builtins)}:
            if not any(name in bound for bound in self._binds):
                raise RefusedError(f"it uses {name}, which is not defined at the top of the file")
            self.keep(name, "it")
        made = f"({ast.unparse(function)})(row)"
        self._made.append(f"def rows(row):\n    return {made if is_whole else f'{{**row, **{made}}}'}")
        return "rows"

    def text(self) -> str:
        """Return the file, "" for nothing."""
        if not self._kept and not self._made:
            return ""
        lines, parts = self.script.text.splitlines(), list[str]()
        for place in sorted(self._kept):
            statement = self._statements[place]
            if isinstance(statement, ast.ImportFrom | ast.Import):
                names = [one for one in statement.names if _as_bound(one) in self._names or one.name == "*"]
                statement.names = names
                parts.append(ast.unparse(statement))
            elif isinstance(statement, _COMPOUND):
                start = min(one.lineno for one in (statement, *getattr(statement, "decorator_list", ())))
                parts.append(f"\n\n{textwrap.dedent(chr(10).join(lines[start - 1 : statement.end_lineno]))}\n\n")
            else:
                parts.append(ast.get_source_segment(self.script.text, statement) or ast.unparse(statement))
        body = "\n".join([*parts, *(f"\n\n{one}\n" for one in self._made)]).replace("\n\n\n\n\n", "\n\n\n").strip("\n")
        return f'"""Copied from {self.script.file.name} with what they use; the file itself would train."""\n\n{body}\n'

    def _changes(self, place: int, name: str) -> bool:
        """Whether a statement calls a method of a name, or sets an entry or attribute of it."""
        match self._statements[place]:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=changed))):
                pass
            case ast.Assign(targets=[ast.Subscript(value=changed) | ast.Attribute(value=changed)]):
                pass
            case _:
                return False
        return ast.unparse(changed).partition(".")[0] == name

    def _require_import(self, statement: ast.ImportFrom | ast.Import, name: str, where: str) -> None:
        module = getattr(statement, "module", None) or next(
            one.name for one in statement.names if name in (_as_bound(one), one.name)
        )
        if module.partition(".")[0] in _NOT_THERE:
            raise RefusedError(f"{where}: it comes from {module}, which is not there when a reward runs")


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for one in body:
        if isinstance(one, ast.If) and ast.unparse(one.test).startswith("__name__ =="):
            yield from _top_level(one.body)
        else:
            yield one


def _as_bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement or expression binds, without those in functions and classes of it."""
    if isinstance(node, _SCOPES):
        yield node.name
        return
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.alias):
        yield _as_bound(node)
    for part in ast.iter_child_nodes(node):
        yield from _bound(part)


def _read(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load):
            yield one.id
        elif isinstance(one, ast.Global):
            yield from one.names
