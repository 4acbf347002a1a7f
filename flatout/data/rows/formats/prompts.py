"""Rows of which only the prompt is read, for runs that answer it themselves; rewards get the whole row."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from flatout.data.conversation import Conversation
from flatout.data.rows.formats.answers import PROMPTS, prompt_of
from flatout.data.rows.formats.conversations import CHAT_COLUMNS, finished
from flatout.data.rows.formats.fields import FieldError, Row

PROMPTED: Literal["prompts"] = "prompts"
"""The format's name."""
ASKED = ("prompt", "problem", "query", *PROMPTS[1:])


def asks_by_text(row: Row) -> bool:
    """Whether a row of this format has its prompt as a text; a chat may be one too, as JSON."""
    name = row.first(ASKED) or ""
    return isinstance(row.columns.get(name), str) and name not in map(row.name, CHAT_COLUMNS)


def parse_prompt(row: Row) -> Conversation:
    """Parse a prompt: the first of the columns ASKED with something in it, a text or turns; optional CHAT_OPTIONAL.

    Raises FieldError for a chat that ends with an answer, and for an empty question.
    """
    name = row.first(ASKED)
    if name is not None and isinstance(parts := row.columns[name], list):
        is_one = all(isinstance(part, dict) and not {"role", "from"} & part.keys() for part in parts)
        if is_one and row.options.columns.keys().isdisjoint(("role", "from")):  # the parts of one turn
            turn = {"role": "user", "content": parts}
            row = Row({**row.columns, name: [turn]}, row.options, row.origin)
    if (asked := prompt_of(row, ASKED)) is None:
        raise FieldError(f"has no prompt; give it as {', '.join(ASKED[:4])} or messages")
    last, place = asked.messages[-1], asked.places[-1]
    if last.role == "assistant":
        raise FieldError(f"{place} is an assistant turn, and the model answers; move it into a column of its own")
    if not last.content.strip():
        raise FieldError(f"{place} is empty; there is nothing to answer")
    return replace(finished(asked, row), is_prompt=True)
