"""Files of settings as YAML: read with limits on their size, and what is wrong with one in words that mend it."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from flatout.config.folders import is_run_folder
from flatout.config.schema import Config
from flatout.errors import Fix, SecurityError, UsageError
from flatout.io.near_path import did_you_mean, unknown_user

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 20
MAX_VALUES = 50_000
YAML_TYPES = (".yaml", ".yml", "")
# a file of rows, not of settings
ROW_TYPES = (".jsonl", ".csv", ".tsv", ".txt", ".parquet")
_KINDS = {dict: "a mapping", list: "a list", str: "text", type(None): "nothing", bool: "true or false"}
# first bytes of files that are not UTF-8 text
_OTHER_FILES = {
    b"\xff\xfe": "it is UTF-16",
    b"\xfe\xff": "it is UTF-16",
    b"\x1f\x8b": "it is compressed (gzip)",
    b"PK": "it is a zip archive",
}
# part of what PyYAML says -> what a person does
_YAML_FAULTS = {
    "mapping values are not allowed": "begin it as far left as its neighbours, and put a value with `: ` in quotes",
    "an alias": "put a value that begins with * in quotes",
    "end of stream": "close the quote or bracket that begins here",
    "another document": "remove this `---`, a file has the settings of one run",
    "escape": "use single quotes, which keep a backslash as it is",
    "could not find expected ':'": "write a name, a colon and a space before the value",
    "cannot start any token": "put a value that begins with @, ` or % in quotes",
    "expected ',' or": "close the bracket, and separate values by commas",
    "expected <block end>": "begin it as far left as its neighbours",
}


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys, which YAML would silently drop, and unbounded expansion."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._num_values = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one value; an alias counts as all values that it stands for, so nested aliases cannot multiply."""
        line = self.peek_event().start_mark.line + 1
        is_alias = self.check_event(yaml.AliasEvent)
        before = self._num_values
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise SecurityError(f"line {line}: nested more than {MAX_DEPTH} levels deep; settings need few")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias and node not in self._sizes:
            raise UsageError(f"line {line}: an alias refers to a value that contains it; write the values out")
        self._num_values += self._sizes[node] if is_alias else 1
        if self._num_values > MAX_VALUES:
            raise SecurityError(f"line {line}: aliases expand to more than {MAX_VALUES:,} values; write the values out")
        self._sizes.setdefault(node, self._num_values - before)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise UsageError(f"line {line}: a key must be plain text")
            if key_node.value in seen:
                raise UsageError(f"line {line}: key {key_node.value!r} is given twice; keep one")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _refuse_tag(loader: _StrictLoader, node: yaml.Node) -> Any:
    kind = node.tag.replace("tag:yaml.org,2002:", "!!")
    text = f"{kind} is no kind of setting; write text, a number, a list or a mapping"
    raise UsageError(f"line {node.start_mark.line + 1}: {text}")


# what YAML knows beside JSON's values, and would be read as text or a list
for _tag in ("binary", "omap", "pairs", "set"):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _refuse_tag)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raises YAMLError, ValueError, UsageError and SecurityError."""
    # _StrictLoader is a SafeLoader: it builds plain values only
    return yaml.load(text, Loader=_StrictLoader)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings of a YAML file, unchecked.

    Raises UsageError, and SecurityError for Python objects, unbounded expansion or a large file.
    """
    text = read_text(path)
    try:
        values = parse_yaml(text)
    except yaml.constructor.ConstructorError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise SecurityError(f"{path}:{line}: {error.problem}; only plain values are allowed") from error
    except yaml.YAMLError as error:
        if path.suffix in ROW_TYPES:
            fix = Fix({"model": "Qwen/Qwen3-0.6B", "data": str(path)}, "for example")
            raise UsageError(f"{path} holds rows, not settings", [fix]) from error
        raise UsageError(f"{path}: {_odd_line(text) or _yaml_fault(error)}") from error
    except (UsageError, SecurityError) as error:
        raise error.at(path) from None
    except ValueError as error:
        # an impossible date, or a number with thousands of digits
        raise UsageError(f"{path}: a value cannot be read: {str(error).partition(';')[0]}") from error
    if not isinstance(values, dict):
        is_dashed = isinstance(values, list) and all(isinstance(value, dict) for value in values)
        hint = "remove the dashes" if is_dashed else "`flatout init new.yaml` writes one"
        expected = f"expected sections such as `model:`, found {kind_of_value(values)}; {hint}"
        raise UsageError(f"{path}: {_odd_line(text) or expected}")
    return values


def kind_of_value(value: object) -> str:
    """Return the kind of a value for messages, such as "a list"."""
    return _KINDS.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def read_text(path: Path) -> str:
    """Return the text of a file of settings. Raises UsageError, or SecurityError above MAX_FILE_BYTES."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        hint = ""
        if isinstance(error, FileNotFoundError | IsADirectoryError):
            with contextlib.suppress(OSError):  # a name in it that is too long
                hint = _instead_of(path)
        raise UsageError(hint or f"{path}: cannot be read as a configuration: {reason}") from error
    if len(content) > MAX_FILE_BYTES:
        raise SecurityError(f"{path}: too large for a configuration (limit {MAX_FILE_BYTES:,} bytes)")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        cause = next((kind for start, kind in _OTHER_FILES.items() if content.startswith(start)), "it is not UTF-8")
        raise UsageError(f"{path}:{line}: cannot be read as a configuration: {cause}; save it as UTF-8 text") from error


def _instead_of(path: Path) -> str:
    """Say that a path is a folder or does not exist, and what to name instead: one that is there, or a new one."""
    for file in (path / "config.yaml", path / "run.yaml", Path("runs") / path / "config.yaml"):
        if file.is_file():
            what = "run" if is_run_folder(file.parent) else "folder"
            return f"{path} is a {what}; its settings are in {file}"
    if (path / "config.json").is_file():
        return f"{path} is a model, not a YAML file; pass it as model={path}"
    if path.exists():
        shown = ", ".join(map(str, sorted(path.glob("*/config.yaml"))[:3]))
        return f"{path} {f'holds runs; to continue one, give its settings: {shown}' if shown else 'is a folder'}"
    user, here = unknown_user(path), Path(path.name)
    if user and here.is_file():
        return f"{path}: {user}; did you mean {here}?"
    if near := did_you_mean(path):
        return f"{path}: no such file{near}"
    there = [str(file) for file in path.parent.glob("*.y*ml") if file.is_file()] if path.parent.is_dir() else []
    there.sort(key=lambda file: (file != "run.yaml", file))
    listing = f"; files here include {', '.join(there[:4])}" if there else ""
    new = path if path.suffix in YAML_TYPES else "run.yaml"
    written = "" if path.suffix == ".py" else f"; `flatout init {shlex.quote(str(new))}` writes one"
    return f"{path}: {user or f'no such file{listing}{written}'}"


def _yaml_fault(error: yaml.YAMLError) -> str:
    """Say on which line a text is not valid YAML, why, and what mends it."""
    problem, mark = str(getattr(error, "problem", None) or error), getattr(error, "problem_mark", None)
    if "quoted scalar" in str(getattr(error, "context", "")) and "end of stream" in problem:
        mark = getattr(error, "context_mark", mark)  # where the quote begins
    if mark is None:
        return f"not valid YAML: {' '.join(problem.split())}"
    whole = f"{getattr(error, 'context', '')} {problem}"
    advice = next((advice for part, advice in _YAML_FAULTS.items() if part in whole), "write `name: value`")
    return f"line {mark.line + 1}: {advice} (not valid YAML: {problem})"


def _odd_line(text: str) -> str:
    """Say which line makes a text no YAML and how to write it, if what is wrong with it is known; else ""."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r" *\t", line):
            return f"line {number} begins with a tab; YAML allows only spaces: write two in its place"
        if (match := re.match(r" *([\w.]+) ?=", line)) and match[1].partition(".")[0] in Config.model_fields:
            return f"line {number}: write `{match[1]}: ` in place of `{match[0].strip()}`"
        if (match := re.match(r" *(\w+):\S", line)) and match[1] in Config.model_fields:
            return f"line {number}: write a space after `{match[1]}:`"
    return ""
