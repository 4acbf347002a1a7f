"""The one canonical form that every data format becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row came from, for messages: `train.jsonl:57` or `org/set[train]:57` (rows count from 1)."""

    source: str
    row: int

    def __str__(self) -> str:
        return f"{self.source}:{self.row}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call of an assistant turn; `arguments` is a JSON object."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `train` None leaves the choice to `data.loss_type`; True or False overrides it for this turn."""

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    train: bool | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat: at least one message; `tools` are JSON schemas handed to the template."""

    messages: tuple[Message, ...]
    origin: Origin
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class PlainText:
    """A document trained on whole (continued pretraining), or a prompt/completion pair without a template.

    `prompt` is context without loss; `text` carries loss and is ended by the end-of-text token.
    """

    text: str
    origin: Origin
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row that arrived tokenised: `trained[i]` says whether token i carries loss."""

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    origin: Origin = field(default=Origin("memory", 1))


Sample = Conversation | PlainText | TokenRow
