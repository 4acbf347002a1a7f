"""Ready rewards: a docstring is the rule that a run prints; arguments after `row` are settings of RewardConfig."""

from __future__ import annotations

import ast
import inspect
import json
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from flatout.errors import UsageError, needs_extra

Row = Mapping[str, Any]
# commas are between thousands; .5 does not follow a name or a dot
_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d{1,4})?"
_NUMBER = re.compile(
    # neither an exponent nor a part of a number; a sign is one only where no number or name stands before it: not 10-4
    rf"(?<![\d^])(?<!\^{{)((?<![\w.)])[-+])?\\?[$€£¥]?(?:(\d+)(?: (?=\d+/\d)|(?=\\[dt]?frac)))?"
    rf"({_PLAIN}(?:/{_PLAIN})*|\\[dt]?frac{{{_PLAIN}}}{{{_PLAIN}}})",
    re.ASCII,
)
_MINUS = str.maketrans(dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-"))
_FENCED = re.compile(r"^```(?:python|py|json)?[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def make_ready(settings: Row) -> Callable[..., Any]:
    """Return the function of the settings of a RewardConfig with a kind. Raises UsageError."""
    function = READY_REWARDS[settings["kind"]]
    if function is json_schema:
        return partial(function, is_valid=_validator(settings["json_schema"]))
    return partial(
        function, **{name: settings[name] for name in inspect.signature(function).parameters.keys() & settings}
    )


def exact(answer: str, row: Row, *, field: str | None, pattern: str | None) -> bool:
    """The answer, without blanks around it, is the row's field."""
    return _part(answer, pattern) == str(_field(row, field or "answer")).strip()


def number(answer: str, row: Row, *, field: str | None, pattern: str | None) -> bool:
    """The last number of the answer, after its last #### if it has one, equals that of the row's field; 1,000.0 is
    1000, 3/4 is .75, and $ and % are left out."""
    if (right := last_number(str(_field(row, field or "answer")))) is None:
        raise ValueError(f"the row's {field or 'answer'} has no number: {_field(row, field or 'answer')!r:.80}")
    return last_number(_part(answer, pattern)) == right


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, after its last `####` if it has one; None without any.

    A fraction is one number, also with a whole before it; of more than two numbers with slashes, as in a date, the last
    one counts.
    """
    numbers = _NUMBER.findall(text.rpartition("####")[2].translate(_MINUS))
    if not numbers:
        return None
    sign, whole, said = numbers[-1]
    try:
        *above, last = (Fraction(each.replace(",", "")) for each in re.findall(_PLAIN, said))
        value = int(whole or 0) + (above[0] / last if len(above) == 1 and last else last)
    except ValueError:  # more digits than Python reads
        return None
    return -value if sign == "-" else value


def regex(answer: str, row: Row, *, pattern: str) -> bool:
    """The answer has a match of the pattern."""
    return re.search(pattern, answer) is not None


def json_schema(answer: str, row: Row, *, is_valid: Callable[[Any], bool]) -> bool:
    """The answer's last fenced block, else the whole answer, is JSON that the schema accepts."""
    try:
        # int refuses NaN and Infinity, which JSON lacks
        return is_valid(json.loads(_block(answer), parse_constant=int))
    except (ValueError, ArithmeticError, RecursionError):  # also of numbers and depths that jsonschema cannot check
        return False


def _validator(schema: Row) -> Callable[[Any], bool]:
    with needs_extra("kind: json_schema", "jsonschema"):
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    kind = validator_for(schema)
    # an empty registry: no address is fetched
    is_valid: Callable[[Any], bool] = kind(schema, registry=Registry()).is_valid
    try:
        kind.check_schema(schema)
        is_valid(None)
    except (SchemaError, Unresolvable, RecursionError) as error:
        raise UsageError(f"json_schema cannot be used: {getattr(error, 'message', error)!s:.200}; correct it") from None
    return is_valid


def code(answer: str, row: Row, *, field: str | None, seconds: float) -> bool:
    """The answer's last fenced block, else the whole answer, is Python that passes the row's tests in time."""
    tests = _field(row, field or "tests")
    # that all tests ran is told by a word that the code does not know, not by an exit code that it can choose
    word, tests = secrets.token_hex(16), tests if isinstance(tests, str) else "\n".join(tests)
    ast.parse(tests)  # or no answer could pass
    task = {"source": _block(answer), "tests": tests, "word": word, "seconds": seconds}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-I", "-B", str(Path(__file__).with_name("run_code.py"))]
        env = {"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, input=json.dumps(task).encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                cwd=folder, env=env, timeout=seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return done.stdout == word.encode()


def length(
    completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], *, min_tokens: int, max_tokens: int
) -> list[bool]:
    """The answer has min_tokens to max_tokens tokens, its stop token too."""
    return [min_tokens <= len(ids) <= max_tokens for ids in completion_ids]


READY_REWARDS: Mapping[str, Callable[..., Any]] = {
    each.__name__: each for each in (exact, number, regex, json_schema, code, length)
}


def _field(row: Row, name: str) -> Any:
    if row.get(name) is None:
        raise ValueError(f"the row has no {name!r}; its columns are: {', '.join(row)}; name another as `field`")
    return row[name]


def _part(answer: str, pattern: str | None) -> str:
    """Return what is compared: the first group of the pattern's last match, else the match; without one, nothing."""
    matches = [*re.finditer(pattern, answer)] if pattern else []
    part = matches[-1][min(1, matches[-1].re.groups)] if matches else None
    return (answer if pattern is None else part or "").strip()


def _block(answer: str) -> str:
    return str([answer, *_FENCED.findall(answer)][-1])
