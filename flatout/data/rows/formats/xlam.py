"""xLAM's rows of single function calls: a query, the tools, and the calls that answer it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flatout.data.conversation import Conversation, Message, Origin
from flatout.data.rows.formats.calls import calls_of, wrapped
from flatout.data.rows.formats.conversations import TurnReader, finished
from flatout.data.rows.formats.fields import FieldError, Reading, list_at, text_at

# xLAM writes types as Python does: "str", "List[int]", "float, optional"
_TYPES = {
    "str": "string", "string": "string", "int": "integer", "integer": "integer", "float": "number",
    "number": "number", "bool": "boolean", "boolean": "boolean", "list": "array", "array": "array", "tuple": "array",
    "set": "array", "dict": "object", "object": "object",
}  # fmt: skip


def parse_xlam(row: Mapping[str, Any], origin: Origin, reading: Reading) -> Conversation:
    """Parse query, tools and answers (lists, or JSON text of them): one question and its parallel calls.

    Parameters become a JSON Schema, which is what templates and models read elsewhere.
    """
    query, tools, answers = map(reading.name, ("query", "tools", "answers"))
    turns = TurnReader(reading)
    turns.add(Message("user", text_at(row.get(query), query)), query)
    calls = calls_of(list_at(row.get(answers), answers), answers)
    if not calls:
        raise FieldError(f"{answers} is empty; there is nothing to learn")
    turns.add(Message("assistant", "", tool_calls=calls), answers)
    functions = [_with_schema(tool) for tool in wrapped(list_at(row.get(tools), tools), tools)]
    return finished(turns, row, origin, tuple(functions))


def _with_schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool["function"]
    arguments = function.get("parameters")
    is_flat = isinstance(arguments, Mapping) and all(isinstance(value, Mapping) for value in arguments.values())
    if not is_flat or "properties" in arguments:
        return tool  # a schema already
    properties, required = {}, []
    for name, argument in arguments.items():
        properties[name] = _property(argument)
        if "default" not in argument and "optional" not in str(argument.get("type")).lower():
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    return {**tool, "function": {**function, "parameters": schema}}


def _property(argument: Mapping[str, Any]) -> dict[str, Any]:
    """Return one argument with a JSON type; a type that has none stays in words in the description."""
    written = argument.get("type")
    if not isinstance(written, str):
        return dict(argument)
    bare = re.sub(r",?\s*\boptional\b\s*$", "", written.strip(), flags=re.IGNORECASE).strip()
    inner = re.fullmatch(r"Optional\[(.*)\]", bare)
    bare = inner[1] if inner else bare
    outer, _, rest = bare.partition("[")
    known = _TYPES.get(outer.strip().lower())
    typed = {name: value for name, value in argument.items() if name != "type"}
    if known is None:
        if bare:
            typed["description"] = f"{typed.get('description') or ''} (type: {bare})".strip()
        return typed
    item = _TYPES.get(rest.rstrip("]").strip().lower()) if known == "array" else None
    return {"type": known, **({"items": {"type": item}} if item else {}), **typed}
