"""JSON read strictly (RFC 8259): errors name line and column, and nothing is guessed, dropped or altered."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

# What Python's scanner says -> what a person should read; {ends} is how the open object or list may go on.
_MESSAGES = {
    "Expecting ',' delimiter": "expected ',' or {ends}",
    "Expecting ':' delimiter": "expected ':' after the key",
    "Expecting property name enclosed in double quotes": "expected a key in double quotes",
    "Illegal trailing comma before end of object": "expected a key in double quotes",
    "Illegal trailing comma before end of array": "expected a value",
    "Expecting value": "expected a value",
    "Unterminated string starting at": "this string has no closing quote",
    "Invalid control character at": "control character inside a string; write it as an escape such as \\n",
    "Extra data": "expected the end of the value",
}
# strings first, so that a NaN inside a text is not taken for a bare one
_NOT_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|(-?(?:NaN|Infinity))', re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)


class JSONSyntaxError(Exception):
    """Text that is no JSON: `line` and `column` count from 1, in characters; `what` says what was expected.

    `at_second_value` is True when a whole value came first, as in JSON Lines.
    """

    def __init__(self, what: str, line: int, column: int, at_second_value: bool = False) -> None:
        super().__init__(f"{line}:{column}: {what}")
        self.what, self.line, self.column, self.at_second_value = what, line, column, at_second_value


class _RefusedError(Exception):
    """A value that Python's scanner takes and RFC 8259 does not, or leaves undefined (NaN, a key twice)."""


def _refuse_constant(text: str) -> NoReturn:
    raise _RefusedError(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _RefusedError(json.dumps(next(key for key in keys if keys.count(key) > 1), ensure_ascii=False))
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)


def parse_json(text: str) -> Any:
    """The value of one JSON text.

    Raises JSONSyntaxError for bad syntax, NaN and Infinity, a key given twice in one object, more than 4,300 digits
    in an integer, or nesting deeper than the interpreter's limit (about 1,000).
    """
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _explained(error) from None
    except _RefusedError as refused:
        raise _refused_at(text, str(refused)) from None
    except RecursionError:
        raise JSONSyntaxError("nested too deeply", 1, 1) from None
    except ValueError as error:  # an integer of too many digits: Python refuses it without a position
        raise JSONSyntaxError(str(error).split(";")[0].lower(), 1, 1) from None


def _explained(error: json.JSONDecodeError) -> JSONSyntaxError:
    # the pure Python scanner ends some messages with "at", the C one does not
    known = _MESSAGES.get(error.msg) or _MESSAGES.get(error.msg.removesuffix(" at"))
    what = known.format(ends=_closing_bracket(error.doc, error.pos)) if known else error.msg.lower()
    if error.pos >= len(error.doc.rstrip()):
        what += "; the text ends here"
    return JSONSyntaxError(what, error.lineno, error.colno, at_second_value=error.msg == "Extra data")


def _closing_bracket(text: str, position: int) -> str:
    """The quoted bracket that closes the innermost object or list open at `position`."""
    open_brackets: list[str] = []
    for token in _TOKEN.finditer(text, 0, position):
        if token[0] in "{[":
            open_brackets.append(token[0])
        elif token[0] in "}]":
            open_brackets.pop()
    return "'}'" if open_brackets[-1:] == ["{"] else "']'"


def _refused_at(text: str, found: str) -> JSONSyntaxError:
    if found.startswith('"'):
        # the hook runs when the object closes and knows no position; the key's second place is near enough to find it
        starts = [match.start() for match in re.finditer(re.escape(found) + r"\s*:", text)]
        position = starts[1] if len(starts) > 1 else 0
        what = f"key {found} is given twice in one object"
    else:
        position = next((match.start() for match in _NOT_NUMBER.finditer(text) if match[1]), 0)
        what = f"{found} is no JSON value; write null or a number"
    line_start = text.rfind("\n", 0, position) + 1
    return JSONSyntaxError(what, text.count("\n", 0, position) + 1, position - line_start + 1)
