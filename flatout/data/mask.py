"""Which characters of a rendered conversation carry loss. Every answer is proved on the row itself, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flatout.data.conversation import Conversation, Message, Origin
from flatout.data.mask_marks import MarkError, marked_spans, with_visible_marks
from flatout.data.mask_turns import PROBES, Row, TurnFinder, UnprovenTurnError
from flatout.data.template import RENDER_ERRORS, ChatTemplate, RawMessage
from flatout.data.typed_control import UnplacedControlError, find_typed
from flatout.errors import DataError

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MaskedText:
    """A rendered conversation.

    `spans` are the half-open character ranges that carry loss, ascending and disjoint; `typed` those of control tokens
    that stand in the data and must stay text; `num_reasoning_dropped` turns whose reasoning the template left out.
    """

    text: str
    spans: tuple[Span, ...]
    typed: tuple[Span, ...] = ()
    num_reasoning_dropped: int = 0


class Masker:
    """Renders conversations by one template and masks them by one loss type."""

    def __init__(
        self,
        template: ChatTemplate,
        loss_type: Literal["response_only", "all"] = "response_only",
        control: re.Pattern[str] | None = None,
    ) -> None:
        """Learns the template's generation prompt from probes. Raises DataError when it follows no known shape."""
        self.template = template
        self.loss_type = loss_type
        self._control = control
        self._turns = TurnFinder(template)
        self._marked_source = with_visible_marks(template) if template.has_marks else None

    def end_of_turn(self) -> str:
        """What ends an answer, by this template and its marks ("<|im_end|>"); empty when nothing does."""
        turns = (Message("user", "a"), Message("assistant", PROBES[0]))
        masked = self.mask(Conversation(turns, Origin("probe", 1)))
        ends = [masked.text[start:end] for start, end in masked.spans]
        return "".join(ends).rpartition(PROBES[0])[2].strip().partition("\n")[0]

    def mask(self, conversation: Conversation) -> MaskedText:
        """Render and mask one conversation.

        Raises DataError with the row and the turn when the template refuses it, leaves out a message's text, or when
        the place of a turn cannot be proved.
        """
        messages = conversation.messages
        row = Row(
            self.template, self.template.raw_messages(conversation), conversation.tools, self._render(conversation)
        )
        _check_all_text_is_there(conversation, row.text)
        try:
            spans = self._spans(row, messages)
            typed = find_typed(self.template, row.messages, row.tools, row.text, self._control)
        except (UnprovenTurnError, MarkError, UnplacedControlError) as error:
            raise DataError(f"{conversation.origin}: chat template {self.template.name!r}: {error}") from error
        _check_order(conversation, spans)
        dropped = sum(
            1 for m in messages if m.reasoning and m.reasoning.strip() and m.reasoning.strip() not in row.text
        )
        return MaskedText(row.text, spans, typed, dropped)

    def _render(self, conversation: Conversation) -> str:
        raw = self.template.raw_messages(conversation)
        try:
            return self.template.render(raw, conversation.tools)
        except RENDER_ERRORS as error:
            turn = self._first_refused(raw, conversation.tools, str(error))
            raise DataError(
                f"{conversation.origin}: messages[{turn}] ({raw[turn]['role']}): chat template {self.template.name!r} "
                f"refuses it: {error}; fix the row, or set data.template"
            ) from error

    def _first_refused(self, raw: Sequence[RawMessage], tools: Sequence[Mapping[str, Any]], reason: str) -> int:
        for turn in range(len(raw)):
            try:
                self.template.render(raw[: turn + 1], tools)
            except RENDER_ERRORS as error:
                if str(error) == reason:
                    return turn
        return len(raw) - 1

    def _spans(self, row: Row, messages: Sequence[Message]) -> tuple[Span, ...]:
        if self.loss_type == "all":
            silent = [self._turns.span(row, k) for k, message in enumerate(messages) if message.train is False]
            return _complement(silent, len(row.text))
        wanted = [message.role == "assistant" if message.train is None else message.train for message in messages]
        if self._marked_source is not None:
            return self._by_marks(row, messages, wanted)
        return tuple(self._turns.span(row, k) for k, want in enumerate(wanted) if want)

    def _by_marks(self, row: Row, messages: Sequence[Message], wanted: Sequence[bool]) -> tuple[Span, ...]:
        assert self._marked_source is not None
        spans = marked_spans(self.template, self._marked_source, row)
        answers = [k for k, message in enumerate(messages) if message.role == "assistant"]
        if all(wanted[k] == (messages[k].role == "assistant") for k in range(len(messages))):
            return spans
        if len(spans) != len(answers):
            raise MarkError(
                f"{len(answers)} assistant turns but {len(spans)} marked ranges, so train: cannot be applied"
            )
        by_turn = dict(zip(answers, spans, strict=True))
        return tuple(by_turn.get(k) or self._turns.span(row, k) for k, want in enumerate(wanted) if want)


def _complement(silent: Sequence[Span], length: int) -> tuple[Span, ...]:
    spans: list[Span] = []
    position = 0
    for start, end in silent:
        spans.append((position, start))
        position = end
    spans.append((position, length))
    return tuple(span for span in spans if span[0] < span[1])


def _check_all_text_is_there(conversation: Conversation, text: str) -> None:
    """A template without a place for a role drops it without a word; a row must not lose its system prompt so."""
    for turn, message in enumerate(conversation.messages):
        content = message.content.strip()
        if not content or content in text or "</think>" in content:
            continue
        if json.dumps(content, ensure_ascii=False)[1:-1] in text or json.dumps(content)[1:-1] in text:
            continue  # some templates write tool results as JSON text
        raise _left_out(conversation, turn, "text")
    for turn, message in enumerate(conversation.messages):
        if any(call.name not in text for call in message.tool_calls):
            raise _left_out(conversation, turn, "tool calls")


def _left_out(conversation: Conversation, turn: int, what: str) -> DataError:
    role = conversation.messages[turn].role
    return DataError(
        f"{conversation.origin}: messages[{turn}] ({role}): the chat template leaves its {what} out; "
        "choose a template that has a place for it (data.template), or remove it from the row"
    )


def _check_order(conversation: Conversation, spans: Sequence[Span]) -> None:
    flat = [position for span in spans for position in span]
    if flat != sorted(flat):
        raise DataError(f"{conversation.origin}: the turns of the rendered text overlap; use another chat template")
