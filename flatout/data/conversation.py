"""The common form that all data formats are parsed into."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)


def is_in_memory(path: str) -> bool:
    """Whether a file is a copy of rows in Python (see flatout.api.inputs): a person knows no name and no settings."""
    return re.fullmatch(r"(?:.*/)?in_memory/data-\w+/rows\.\w+", path) is not None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row came from, for messages: `train.jsonl:57` or `org/set[train]:57`.

    Rows count from 1; what is no row of its source is row 0.
    """

    source: str
    row_number: int

    def __str__(self) -> str:
        number, source = self.row_number, self.source
        return f"row {number} of your data" if is_in_memory(source) else f"{source}:{number}" if number else source


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call of an assistant turn; `arguments` is a JSON object."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str | None = None


PICTURE = "\U000f5a14"
"""The character that stands for a picture in the content of a message, and in a rendered conversation."""


@dataclass(frozen=True, slots=True)
class PictureSource:
    """Where a picture is: a path, a data URI, or the bytes of its file. `place` is its field in the row."""

    value: str | bytes
    place: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `train` True or False decides about its loss; with None, `data.loss_type` does.

    `silent` are character ranges of `content` that carry no loss even if the turn does: ascending, disjoint. `pictures`
    are those that the PICTURE characters of `content` stand for, in their order.
    """

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    train: bool | None = None
    silent: tuple[tuple[int, int], ...] = ()
    pictures: tuple[PictureSource, ...] = ()


def is_empty(message: Message) -> bool:
    """Return whether a turn has no content at all."""
    return not (message.content.strip() or message.tool_calls or message.reasoning)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat of at least one message; `tools` are JSON schemas passed to the template.

    `template_args` are the row's own variables for the template; they come before `data.template_args`. `remarks` names
    what reading the row noticed, which the build report counts: `key:id` is a key of a turn that is not read.
    """

    messages: tuple[Message, ...]
    origin: Origin
    tools: tuple[Mapping[str, Any], ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    is_prompt: bool = False
    """Whether it ends where the model answers, and has nothing to learn."""

    @property
    def pictures(self) -> tuple[PictureSource, ...]:
        """The pictures of all turns, in their order."""
        return tuple(picture for message in self.messages for picture in message.pictures)


@dataclass(frozen=True, slots=True)
class PlainText:
    """A document trained on as a whole (continued pretraining), or a prompt/completion pair without a template.

    `prompt` is context without loss; `text` carries loss except in its `silent` character ranges, which are ascending
    and disjoint. The end-of-text token is added after it. `remarks` is as in Conversation.
    """

    text: str
    origin: Origin
    prompt: str = ""
    silent: tuple[tuple[int, int], ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row that is already tokenized: `loss_mask[i]` says whether token i carries loss."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    origin: Origin = field(default=Origin("memory", 1))


Sample = Conversation | PlainText | TokenRow


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """Answers to one prompt that are compared, or one answer with a label; only the answers' turns carry loss.

    `units` are indices into `answers`: the better and the worse answer of each pair, or a labelled answer alone. A text
    for classification is the only answer of its row, with its class, and sampled answers, as tokens, are one unit.
    `columns` has the values of its units, samples or tokens, as a column is per.
    """

    answers: tuple[Conversation | PlainText | TokenRow, ...]
    units: tuple[tuple[int, ...], ...]
    origin: Origin
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


ParsedRow = Sample | PreferenceRow
