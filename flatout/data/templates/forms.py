"""The spelling in which a template reads a row: found by rendering probes, once a template, never by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flatout.data.conversation import PICTURE

RawMessage = dict[str, Any]
# stands for </think> in the last answer while a template renders it that would cut the text there
CLOSE = "\U000f5a13"
_OPEN_TAG, CLOSE_TAG = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Form:
    """How tool calls, tools and reasoning are given to a template.

    `arguments_as_text`: JSON text instead of objects. `tools_as`: the variable that takes the tools; another than
    `tools` takes the bare functions. `empty_tools`: rows without tools give an empty list. `reasoning`: in fields of
    its own; `inline`, in the content between <think> tags; `last`, the same for a template that cuts the content at
    </think>, also in the last answer, where inference shows the reasoning that the model has just written; `prefix`,
    the same for one whose generation prompt writes <think>, and that takes a last answer which begins there. `breaks`:
    its tags stand on lines of their own. `parts`: every content is a list of typed parts, as templates of
    vision-language models have it.
    """

    arguments_as_text: bool = False
    tools_as: str = "tools"
    empty_tools: bool = False
    reasoning: Literal["fields", "inline", "last", "prefix"] = "fields"
    breaks: bool = True
    parts: bool = False

    def content(self, reasoning: str, content: str) -> str:
        if not self.breaks:
            return f"{_OPEN_TAG}{reasoning}{CLOSE_TAG}{content}"
        return f"{_OPEN_TAG}\n{reasoning}\n{CLOSE_TAG}\n\n{content}"

    def tools(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """Return the keywords that give the tools of a row to the template."""
        if not tools:
            return {"tools": [] if self.empty_tools else None}
        if self.tools_as == "tools":
            return {"tools": [dict(tool) for tool in tools]}
        return {"tools": None, self.tools_as: [dict(tool["function"]) for tool in tools]}

    def shown(self, messages: Sequence[RawMessage]) -> list[RawMessage]:
        """Return the messages as the template gets them; its text has CLOSE for CLOSE_TAG where it must not cut."""
        spelt = list(messages)
        hides = self.reasoning in ("last", "prefix") and bool(spelt) and spelt[-1]["role"] == "assistant"
        if hides and CLOSE_TAG in spelt[-1]["content"]:
            thought, _, text = spelt[-1]["content"].partition(CLOSE_TAG)
            if _OPEN_TAG not in thought:  # left to the generation prompt
                thought = f"{_OPEN_TAG}\n{thought.lstrip()}"
            if self.reasoning == "prefix":
                spelt[-1] = spelt[-1] | {"prefix": True}
                thought = thought.lstrip().removeprefix(_OPEN_TAG)
            spelt[-1] = spelt[-1] | {"content": f"{thought}{CLOSE}{text}"}
        return [
            message | {"content": _in_parts(message["content"])}
            if self.parts or PICTURE in message["content"]
            else message
            for message in spelt
        ]


def _in_parts(content: str) -> list[dict[str, str]]:
    """Return a content as typed parts: its texts, and its pictures between them."""
    parts = list[dict[str, str]]()
    for number, text in enumerate(content.split(PICTURE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def shows_reasoning(text: str, thought: str, prompt: str) -> bool:
    """Whether the text of a conversation shows a last answer's reasoning as the model writes it after `prompt`."""
    before = text.partition(thought)[0].rstrip()
    # opened once, and not right behind a block that is closed
    _, closed, behind = before.rpartition(CLOSE_TAG)
    is_again = bool(closed) and behind.strip() == _OPEN_TAG
    opens = before.endswith(_OPEN_TAG) and behind.count(_OPEN_TAG) == 1 and not is_again
    return thought in text and text.startswith(prompt) and opens
