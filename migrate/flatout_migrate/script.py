"""Python scripts, read and never run: their calls, and the constants that arguments come to."""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout import UsageError
from flatout.api.settings import read_json, read_text
from flatout_migrate.translation import RefusedError, Unread

_SUMS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
# a few names can stand for billions of values
MAX_VALUES = 50_000
_DTYPES = ("bfloat16", "float16", "float32")
_BF16_QUESTIONS = ("is_bfloat16_supported", "is_bf16_supported")
# functions that change none of their arguments
_READERS = ("print", "len", "str", "load_dataset", "get_chat_template")


@dataclass(frozen=True, slots=True)
class Call:
    """A call: its name, such as SFTConfig or FastLanguageModel.from_pretrained, and the condition that it is under."""

    name: str
    node: ast.Call
    condition: str = ""


class Script:
    """The syntax tree of a file. A name stands for a value if the file binds it once, to a constant."""

    def __init__(self, file: Path, text: str | None = None) -> None:
        """Read a file or notebook, or a text of it. Raises UsageError for one that is not Python."""
        self.file, self._num_values = file, 0
        self.text = text if text is not None else _cells_of(file) if file.suffix == ".ipynb" else read_text(file)
        try:
            with warnings.catch_warnings(action="ignore"):
                self._tree = ast.parse(self.text)
            self._nodes = [*ast.walk(self._tree)]
        except SyntaxError as error:
            raise UsageError(f"{file}:{error.lineno}: not Python 3: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError):
            raise UsageError(f"{file}: cannot be read as Python; pass the script that trains") from None
        imports = [node for node in self._nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        named = [one for node in imports for one in node.names]
        self._aliases = {one.asname: one.name.rpartition(".")[2] for one in named if one.asname}
        modules = {getattr(node, "module", None) or one.name for node in imports for one in node.names}
        self.imported = {
            one.name: node.module
            for node in imports
            if isinstance(node, ast.ImportFrom) and node.module
            for one in node.names
        }
        self.modules = {name.partition(".")[0] for name in modules}
        self.classes = [node for node in self._nodes if isinstance(node, ast.ClassDef)]
        self._bound, self._changed = Counter(_bound(self._nodes)), {*_changed(self._nodes)}
        self._assigned = {
            target.id: value for target, value in self._assignments() if isinstance(target, ast.Name) and value
        }

    @property
    def body(self) -> list[ast.stmt]:
        """The statements at the top of the file."""
        return self._tree.body

    def attributes(self) -> Iterator[tuple[ast.Attribute, ast.expr]]:
        """Yield the attributes that are set, and their new values; not those of modules and of `self`."""
        for target, value in self._assignments():
            if isinstance(target, ast.Attribute) and value:
                root = ast.unparse(target).partition(".")[0]
                if root not in self.modules | self._aliases.keys() | {"self"}:
                    yield target, value

    def _assignments(self) -> Iterator[tuple[ast.expr, ast.expr | None]]:
        for node in self._nodes:
            if isinstance(node, ast.Assign):
                yield from ((target, node.value) for target in node.targets)
            elif isinstance(node, ast.AnnAssign | ast.AugAssign):
                # x += 1 comes to no constant
                yield node.target, node.target if isinstance(node, ast.AugAssign) else node.value

    def calls(self) -> list[Call]:
        """Return the calls in the order of the file, without those of a branch that a constant closes."""
        try:
            return [*self._calls(self._tree, "")]
        except RecursionError:
            raise UsageError(f"{self.file}: nested too deeply; pass the script that trains") from None

    def _calls(self, node: ast.AST, condition: str) -> Iterator[Call]:
        parts = [(part, condition) for part in ast.iter_child_nodes(node)]
        if isinstance(node, ast.If):
            is_main = ast.unparse(node.test).startswith("__name__ ==")
            choice = True if is_main else self.value(node.test)
            inside = condition or (f"if {ast.unparse(node.test):.60}" if isinstance(choice, Unread) else "")
            taken = [*node.body, *node.orelse] if isinstance(choice, Unread) else node.body if choice else node.orelse
            parts = [(node.test, condition), *((part, inside) for part in taken)]
        elif isinstance(node, ast.ExceptHandler):
            parts = [(part, condition or "after an exception") for part in node.body]
        for part, inside in parts:
            yield from self._calls(part, inside)
        if isinstance(node, ast.Call):
            name = self.name_of(node.func)
            base = self.name_of(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            yield Call(f"{base}.{name}" if name in ("from_pretrained", "get_peft_model") else name, node, condition)

    def name_of(self, node: ast.expr) -> str:
        """Return the last part of a name, as it was before an import renamed it; "" for anything else."""
        if isinstance(node, ast.Attribute):
            return node.attr
        return self._aliases.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def bound_to(self, node: ast.expr) -> ast.expr:
        """Return what a name that is bound once stands for; any other expression as it is."""
        for _ in range(8):
            if not isinstance(node, ast.Name) or self._bound[node.id] != 1 or node.id not in self._assigned:
                break
            node = self._assigned[node.id]
        return node

    def value(self, node: ast.expr) -> Any:
        """Return the constant that an expression comes to, or an Unread, which says that it is none."""
        with suppress(RefusedError, ArithmeticError, TypeError, ValueError, RecursionError):
            return self._value(node)
        text = "the value"
        with suppress(RecursionError):
            text = " ".join(ast.unparse(node).split())
        return Unread(f"line {node.lineno}: {text:.60} is not a constant; write its value there")

    def _value(self, node: ast.expr | None) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise UsageError(f"{self.file}: names expand to more than {MAX_VALUES:,} values; write them out")
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return [self._value(part) for part in parts]
            case ast.Dict(keys=keys, values=values):
                return {self._value(key): self._value(value) for key, value in zip(keys, values, strict=True)}
            case ast.Name(id=name) if (bound := self.bound_to(node)) is not node:
                value = self._value(bound)
                return value if name not in self._changed or not isinstance(value, list | dict) else _refuse()
            case ast.Attribute(attr=attr) if attr in _DTYPES:
                return attr
            case ast.Call(func=function) if self.name_of(function) in _BF16_QUESTIONS:
                return "auto"
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=parts):
                return {part.arg or _refuse(): self._value(part.value) for part in parts}
            case ast.Call(func=function, args=[], keywords=parts) if self.name_of(function) == "SamplingParams":
                return {part.arg or _refuse(): self.value(part.value) for part in parts}
        return self._computed(node)

    def _computed(self, node: ast.expr | None) -> Any:
        match node:
            case ast.JoinedStr(values=parts):
                return "".join(str(self._value(part)) for part in parts)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self._value(value)
            case ast.UnaryOp(op=ast.USub(), operand=part):
                return -self._value(part)
            case ast.UnaryOp(op=ast.Not(), operand=part):
                return value if (value := self._value(part)) == "auto" else not value
            case ast.BinOp(left=left, op=sign, right=right):
                return _sum(type(sign), self._value(left), self._value(right))
        return _refuse()


def _refuse() -> Any:
    raise RefusedError


def python_of(cells: Iterable[str]) -> str:
    """Return the code of a notebook's cells, without the lines that are for IPython or the shell."""
    own = (cell for cell in cells if not re.match(r"\s*%%(?!capture|time)", cell))
    return re.sub(r"^([ \t]*)[!%](?:.*\\\n)*.*", r"\1pass", "\n\n".join(own), flags=re.MULTILINE)


def _cells_of(file: Path) -> str:
    notebook = read_json(file)
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise UsageError(f"{file}: expected a notebook, an object with cells")
    return python_of("".join(cell.get("source", "")) for cell in cells if cell.get("cell_type") == "code")


def _sum(sign: type[ast.operator], left: Any, right: Any) -> Any:
    is_text = isinstance(left, str) and isinstance(right, str) and sign is ast.Add
    are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
    return _SUMS[sign](left, right) if sign in _SUMS and (is_text or are_numbers) else _refuse()


def _bound(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield a name each time that a statement binds or deletes it."""
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif not isinstance(node, ast.keyword):
            # functions, classes, their parameters, imports, exceptions and patterns
            named = (getattr(node, field, None) for field in ("name", "arg", "asname"))
            yield from (name for name in named if isinstance(name, str))


def _changed(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield names of objects that a statement or a function may change."""
    for node in nodes:
        match node:
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                yield name
            case ast.Assign(value=ast.Name(id=name)) | ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
                yield name
            case ast.Call(func=ast.Name(id=function), args=parts) if (
                function[:1].islower() and function not in _READERS
            ):
                yield from (part.id for part in parts if isinstance(part, ast.Name))
