"""A converter of Glaive's function-calling rows: one text with speakers in capitals, and tools in the system text.

    data: {sources: [{path: glaive.jsonl, format: "examples/formats/glaive.py:rows"}]}

`chat` has USER:, ASSISTANT: and FUNCTION RESPONSE:, and `<functioncall>` before a call. The functions in `system`
become tools, and the words that announce them are left out.
"""

import json
import re

SPEAKER = re.compile(r"(?:\A|\n)[ \t]*(USER|ASSISTANT|FUNCTION RESPONSE):")
ROLES = {"USER": "user", "FUNCTION RESPONSE": "tool"}
END = "<|endoftext|>"
CALL = "<functioncall>"
# arguments are JSON in single quotes, so the call is not JSON as a whole
QUOTED = re.compile(r"""\{\s*"name":\s*"(?P<name>[^"]+)",\s*"arguments":\s*'(?P<arguments>.*)'\s*\}""", re.DOTALL)
OFFER = re.compile(r",? with access to the following functions\. Use them if required\s*-?\s*\Z")


def rows(row):
    chat = row.get("chat")
    pieces = SPEAKER.split(chat) if isinstance(chat, str) else [""]
    if len(pieces) == 1 or pieces[0].strip():
        raise ValueError("chat does not begin with USER:, ASSISTANT: or FUNCTION RESPONSE:")
    spoken = enumerate(zip(pieces[1::2], pieces[2::2], strict=True), 1)
    prompt, tools = system(row.get("system"))
    messages = [turn(*pair, f"chat, turn {number}") for number, pair in spoken]
    messages.insert(0, {"role": "system", "content": prompt})
    # with its other columns, so that flatout sees what is there besides: pictures, a verdict
    rest = {name: value for name, value in row.items() if name not in ("chat", "system")}
    return {**rest, "messages": messages, "tools": tools}


def turn(speaker, said, place):
    said = said.strip()
    if speaker != "ASSISTANT":
        return {"role": ROLES[speaker], "content": said}
    said = said.removesuffix(END).rstrip()
    if END in said:
        raise ValueError(f"{place} goes on after {END}; a turn of another speaker must follow it")
    before, is_call, text = said.partition(CALL)
    message = {"role": "assistant", "content": before.strip()}
    return {**message, "tool_calls": [call(text.strip(), place)]} if is_call else message


def call(text, place):
    if match := QUOTED.fullmatch(text):
        return {"name": match["name"], "arguments": match["arguments"].replace("\\'", "'")}
    try:
        return {"arguments": {}, **json.loads(text)}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place} is not valid JSON: {error}") from None


def system(text):
    """Return the prompt and the tools of a system text: JSON objects at its end, one after the other."""
    prompt = (text or "").strip().removeprefix("SYSTEM:").strip()
    first = prompt.find("{")
    functions, at = [], first
    while 0 <= at < len(prompt):
        try:
            function, end = json.JSONDecoder().raw_decode(prompt, at)
        except ValueError:
            return prompt, []  # braces in words
        functions.append(function)
        at = end + len(prompt[end:]) - len(prompt[end:].lstrip())
    if not functions:
        return prompt, []
    before = prompt[:first].strip()
    offered = OFFER.sub("", before)
    return f"{offered}." if offered and offered != before else offered, functions
