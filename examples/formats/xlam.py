"""A converter of xLAM's rows of single function calls: a query, the tools, and the calls that answer it.

    data: {sources: [{path: xlam.jsonl, format: "examples/formats/xlam.py:rows"}]}

Tools and answers are lists, or JSON text of them. Parameters become a JSON Schema, which is what templates and models
read elsewhere.
"""

import json
import re

# xLAM writes types as Python does: "str", "List[int]", "float, optional"
TYPES = {
    "str": "string", "string": "string", "int": "integer", "integer": "integer", "float": "number",
    "number": "number", "bool": "boolean", "boolean": "boolean", "list": "array", "array": "array", "tuple": "array",
    "set": "array", "dict": "object", "object": "object",
}  # fmt: skip


def rows(row):
    calls = as_list(row, "answers")
    if not calls:
        raise ValueError("answers is empty; there is nothing to learn")
    if not isinstance(row.get("query"), str):
        raise ValueError(f"query is {row.get('query')!r:.40}, not a string")
    messages = [{"role": "user", "content": row["query"]}, {"role": "assistant", "content": "", "tool_calls": calls}]
    tools = [with_schema(tool) for tool in as_list(row, "tools")]
    # with its other columns, so that flatout sees what is there besides: a system prompt, pictures, a verdict
    rest = {name: value for name, value in row.items() if name not in ("query", "answers")}
    return {**rest, "messages": messages, "tools": tools}


def as_list(row, name):
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, list):
        raise ValueError(f"{name} is a {type(value).__name__}, not a list")
    return value


def with_schema(tool):
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        return {**tool, "function": with_schema(tool["function"])}
    arguments = tool.get("parameters") if isinstance(tool, dict) else None
    is_flat = isinstance(arguments, dict) and all(isinstance(value, dict) for value in arguments.values())
    if not is_flat or "properties" in arguments:
        return tool  # a schema already
    properties, required = {}, []
    for name, argument in arguments.items():
        properties[name] = as_property(argument)
        if "default" not in argument and "optional" not in str(argument.get("type")).lower():
            required.append(name)
    return {**tool, "parameters": {"type": "object", "properties": properties, "required": required}}


def as_property(argument):
    """Return an argument with a JSON type; a type that has none stays in words in the description."""
    written = argument.get("type")
    if not isinstance(written, str):
        return dict(argument)
    bare = re.sub(r",?\s*\boptional\b\s*$", "", written.strip(), flags=re.IGNORECASE).strip()
    inner = re.fullmatch(r"Optional\[(.*)\]", bare)
    bare = inner[1] if inner else bare
    outer, _, rest = bare.partition("[")
    known = TYPES.get(outer.strip().lower())
    typed = {name: value for name, value in argument.items() if name != "type"}
    if known is None:
        if bare:
            typed["description"] = f"{typed.get('description') or ''} (type: {bare})".strip()
        return typed
    item = TYPES.get(rest.rstrip("]").strip().lower()) if known == "array" else None
    return {"type": known, **({"items": {"type": item}} if item else {}), **typed}
