"""Chat templates: which one is used, and rendering messages through transformers' immutable Jinja sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import xxhash
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from flatout.data.conversation import Conversation, Message, ToolCall
from flatout.errors import DataError

OURS = ("chatml", "llama-3", "qwen3", "gemma", "mistral", "phi", "zephyr", "alpaca")
# What a template can raise: its own raise_exception, an undefined name, a filter on a value of the wrong type.
RENDER_ERRORS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

RawMessage = dict[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the tokenizer that supplies its bos and eos text. `name` is for messages."""

    name: str
    source: str
    tokenizer: PreTrainedTokenizerBase
    arguments_as_text: bool = False

    @classmethod
    def checked(cls, name: str, source: str, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
        """A template that was tried: it renders one user turn, and it is known how it wants tool arguments."""
        tried = cls(name, source, tokenizer)
        try:
            tried.render([{"role": "user", "content": "a"}], generation_prompt=True)
        except RENDER_ERRORS as error:
            raise DataError(f"chat template {name!r} cannot render a single user turn: {error}") from error
        return cls(name, source, tokenizer, arguments_as_text=not _takes_objects(tried))

    @property
    def digest(self) -> str:
        """xxh3 of the template's text."""
        return xxhash.xxh3_128_hexdigest(self.source.encode())

    @property
    def has_marks(self) -> bool:
        """Whether `{% generation %}` marks say what the model is to learn."""
        return _GENERATION_TAG.search(self.source) is not None

    def render(
        self,
        messages: Sequence[RawMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = False,
        source: str | None = None,
    ) -> str:
        """The text of `messages`; `source` renders another text than the template's own. Raises RENDER_ERRORS."""
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tools=[dict(tool) for tool in tools] if tools else None,
            chat_template=self.source if source is None else source,
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )
        if not isinstance(text, str):
            raise TypeError(f"the template rendered a {type(text).__name__}, not text")
        return text

    def raw_messages(self, conversation: Conversation) -> list[RawMessage]:
        """The messages in the form that templates read (OpenAI's, with arguments as objects)."""
        return [_raw(message, self.arguments_as_text) for message in conversation.messages]


def choose_template(tokenizer: PreTrainedTokenizerBase, template: str | None, tokenizer_name: str) -> ChatTemplate:
    """`template` (one of OURS, or a .jinja file), else the tokenizer's own.

    Raises DataError when there is none, or when it cannot render one user turn.
    """
    name, source = template_text(tokenizer, template, tokenizer_name)
    return ChatTemplate.checked(name, source, tokenizer)


def named_template(name: str) -> str:
    """The text of one of our templates."""
    return (resources.files("flatout.data") / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def template_text(tokenizer: PreTrainedTokenizerBase, template: str | None, tokenizer_name: str) -> tuple[str, str]:
    """Name (for messages) and text of the template to use. Raises DataError when there is none."""
    if template is None:
        own = tokenizer.chat_template
        if isinstance(own, str) and own:
            return "the tokenizer's own", own
        raise DataError(
            f"tokenizer {tokenizer_name!r} has no chat template; set data.template to one of {', '.join(OURS)}, "
            "or to a .jinja file"
        )
    if template in OURS:
        return template, named_template(template)
    path = Path(template)
    if path.suffix == ".jinja" and path.is_file():
        return path.name, path.read_text(encoding="utf-8")
    raise DataError(f"data.template {template!r} is neither one of {', '.join(OURS)} nor a .jinja file that exists")


def _takes_objects(template: ChatTemplate) -> bool:
    """Some templates paste arguments as text and fail on an object; they get the JSON text instead."""
    call = Message("assistant", "", tool_calls=(ToolCall("f", {"a": 1}, "call00000"),))
    turns: list[RawMessage] = [{"role": "user", "content": "a"}]
    try:
        template.render([*turns, _raw(call, arguments_as_text=False)])
    except RENDER_ERRORS:
        try:
            template.render([*turns, _raw(call, arguments_as_text=True)])
        except RENDER_ERRORS:
            return True  # takes no tool calls at all: the real row will say so
        return False
    return True


def _raw(message: Message, arguments_as_text: bool) -> RawMessage:
    raw: RawMessage = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        # Two names are in use: reasoning_content (Qwen, GLM, DeepSeek) and thinking (gpt-oss).
        raw["reasoning_content"] = raw["thinking"] = message.reasoning
    if message.tool_calls:
        raw["tool_calls"] = [
            {
                "type": "function",
                "id": call.call_id if call.call_id is not None else f"call{index:05d}",
                "function": {"name": call.name, "arguments": _arguments(call.arguments, arguments_as_text)},
            }
            for index, call in enumerate(message.tool_calls)
        ]
    if message.name is not None:
        raw["name"] = message.name
    if message.tool_call_id is not None:
        raw["tool_call_id"] = message.tool_call_id
    return raw


def _arguments(arguments: Mapping[str, Any], as_text: bool) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if as_text else dict(arguments)
