"""A converter of Gemini's rows: `contents` of roles and parts, as its API and its tuning files have them.

    data: {sources: [{path: gemini.jsonl, format: "examples/formats/gemini.py:rows"}]}

Parts are a text, a thought, a functionCall or a functionResponse, in either spelling. systemInstruction and tools are
optional. Thoughts become reasoning, and schemas get JSON's types.
"""

import json

# what a part may be, by each of its spellings, and the typed part that it becomes
PARTS = {
    "text": "text", "functionCall": "tool_use", "function_call": "tool_use", "functionResponse": "tool_result",
    "function_response": "tool_result",
}  # fmt: skip
MEDIA = ("inlineData", "inline_data", "fileData", "file_data")
INSTRUCTION = ("systemInstruction", "system_instruction")
# what stands beside the text and carries no meaning for training
BESIDE = {"thought", "thoughtSignature", "thought_signature", "videoMetadata", "video_metadata"}


def rows(row):
    messages = [
        {"role": "user", **{key: value for key, value in turn.items() if key != "parts"}, "content": typed(turn, place)}
        for turn, place in objects(row.get("contents"), "contents")
    ]
    if not messages:
        raise ValueError("contents is empty; a conversation needs at least one turn")
    instruction = next((row[name] for name in INSTRUCTION if row.get(name)), None)
    functions = []
    for tool, _ in objects(row.get("tools") or [], "tools"):
        functions += tool.get("functionDeclarations", tool.get("function_declarations", [tool]))
    if instruction:
        messages.insert(0, {"role": "system", "content": system(instruction)})
    # with its other columns, so that flatout sees what is there besides: a system prompt, pictures, a verdict
    rest = {name: value for name, value in row.items() if name not in ("contents", *INSTRUCTION)}
    return {**rest, "messages": messages, "tools": [lower_types(function) for function in functions]}


def objects(value, place):
    """Yield the objects of a list, or of JSON text of one, each with its place."""
    try:
        items = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{place} is not valid JSON: {error}") from None
    if not isinstance(items, list):
        raise ValueError(f"{place} is a {type(items).__name__}, not a list")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(f"{place}[{index}] is a {type(item).__name__}, not an object")
        yield item, f"{place}[{index}]"


def typed(turn, place):
    return [as_part(part, here) for part, here in objects(turn.get("parts"), f"{place}.parts")]


def as_part(part, place):
    """Return one of Gemini's parts as the typed part that messages have."""
    if name := next((key for key in MEDIA if part.get(key) is not None), None):
        raise ValueError(f"{place} ({name}) holds media, which this converter does not read")
    names = [key for key in PARTS if part.get(key) is not None]
    others = [key for key, value in part.items() if value is not None and key not in PARTS and key not in BESIDE]
    if len(names) != 1 or others:
        keys = ", ".join(part) or "none"
        raise ValueError(f"{place} is no text, functionCall or functionResponse, which are what is read; keys: {keys}")
    value = part[names[0]]
    if names[0] == "text":
        return {"type": "reasoning" if part.get("thought") else "text", "text": value}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f"{place}.{names[0]} has no name")
    if PARTS[names[0]] == "tool_use":
        return {"type": "tool_use", "name": value["name"], "input": value.get("args") or {}, "id": value.get("id")}
    response = value.get("response")
    text = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
    return {"type": "tool_result", "name": value["name"], "content": text, "tool_use_id": value.get("id")}


def system(instruction):
    if isinstance(instruction, str):
        return instruction
    parts = typed(instruction, "systemInstruction")
    if any(part["type"] != "text" for part in parts):
        raise ValueError("systemInstruction.parts has a call or a thought; a system instruction is text")
    return parts


def lower_types(value):
    """Return a schema whose types are JSON's ("string"), not Gemini's ("STRING")."""
    if isinstance(value, list):
        return [lower_types(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: item.lower() if key == "type" and isinstance(item, str) and item.isupper() else lower_types(item)
        for key, item in value.items()
    }
