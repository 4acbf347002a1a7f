"""Finds which characters of a rendered conversation carry loss; each result is proved on the row itself, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from flatout.data.conversation import Conversation, Message, Origin
from flatout.data.loss_mask.parts import Part, PartFinder, PartSpans, marked_spans, with_visible_marks
from flatout.data.loss_mask.turns import PROBES, Rendering, TurnFinder, UnprovenMaskError
from flatout.data.templates.template import RENDER_ERRORS, ChatTemplate, RawMessage
from flatout.errors import DataError

Span = tuple[int, int]
_MAX_EDGES = 4096
_EMPTY_REASONING = re.compile(r"\s*<think>\s*</think>\s*")


@dataclass(frozen=True, slots=True)
class MaskedText:
    """A rendered conversation.

    `spans` are the half-open character ranges that carry loss, ascending and disjoint; `typed` those of control tokens
    that are part of the data and must stay text; `lost_reasoning` are the turns whose reasoning the template left
    out because others follow.
    """

    text: str
    spans: tuple[Span, ...]
    typed: tuple[Span, ...]
    lost_reasoning: tuple[int, ...]


class Masker:
    """Renders conversations by one template and masks them by one loss type."""

    def __init__(
        self,
        template: ChatTemplate,
        loss_type: Literal["response_only", "all"] = "response_only",
        control: re.Pattern[str] | None = None,
        *,
        mask_empty_reasoning: bool = False,
    ) -> None:
        """Probe the template for its generation prompt. Raises DataError if the prompt changes what precedes it."""
        self.template = template
        self.loss_type = loss_type
        self._control = control
        self._mask_empty_reasoning = mask_empty_reasoning
        self._turns = TurnFinder(template)
        self._marked_source = with_visible_marks(template)
        self._parts = PartFinder(template, self._marked_source, control)
        # proved once per role and text around a turn: its characters before its parts and after them
        self._edges: dict[tuple[str, str, str], tuple[int, int]] = {}

    def end_of_turn(self) -> str:
        """Return what ends an answer in this template and its marks ("<|im_end|>"); empty if nothing does."""
        turns = (Message("user", "a"), Message("assistant", PROBES[0]))
        masked = self.mask(Conversation(turns, Origin("probe", 1)))
        ends = [masked.text[start:end] for start, end in masked.spans]
        return "".join(ends).rpartition(PROBES[0])[2].strip().partition("\n")[0]

    def mask(self, conversation: Conversation, since: int = 0) -> MaskedText:
        """Render and mask one conversation; turns before messages[since] carry no loss.

        Raises DataError with the row and the turn if the template refuses it or leaves out a message's text, or if the
        span of a turn cannot be proved.
        """
        messages, raw = conversation.messages, self.template.raw_messages(conversation.messages)
        text = self._render(conversation.origin, raw, conversation.tools)
        rendering = Rendering(self.template, raw, conversation.tools, text)
        try:
            layout = self._parts.find(rendering)
            lost = self._parts.lost(rendering) if layout is None else layout.lost
            lost_reasoning = _check_lost(conversation, lost)
            spans = self._spans(rendering, layout, messages, since)
            if self._mask_empty_reasoning:
                found = ((start, end, _EMPTY_REASONING.match(text, start, end)) for start, end in spans)
                spans = tuple((empty.end() if empty else start, end) for start, end, empty in found)
            typed: tuple[Span, ...] = ()  # control tokens that are part of the data: all those inside a part
            if self._control is not None and self._control.search(text):
                parts = [(start, end) for _, start, end in layout.spans] if layout else []
                typed = tuple(found.span() for part in parts for found in self._control.finditer(text, *part))
                data = "" if layout else json.dumps([raw, conversation.tools], ensure_ascii=False)
                if control := self._control.search(data):
                    raise UnprovenMaskError(
                        f"the data contains {control[0]!r}, which acts on the text around it; remove it"
                    )
        except UnprovenMaskError as error:
            raise DataError(f"{conversation.origin}: chat template {self.template.name!r}: {error}") from error
        flat = [position for span in spans for position in span]
        if flat != sorted(flat):
            raise DataError(f"{conversation.origin}: turns overlap in the rendered text; use a different template")
        return MaskedText(text, spans, typed, lost_reasoning)

    def _render(self, origin: Origin, raw: Sequence[RawMessage], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self.template.render(raw, tools)
        except RENDER_ERRORS as error:
            for turn in range(len(raw)):  # find the first turn at which it is refused for the same reason
                try:
                    self.template.render(raw[: turn + 1], tools)
                except RENDER_ERRORS as shorter:
                    if str(shorter) == str(error):
                        break
            raise DataError(
                f"{origin}: messages[{turn}] ({raw[turn]['role']}): chat template {self.template.name!r} "
                f"rejects it: {error}; fix the row, or set data.template"
            ) from error

    def _spans(
        self, rendering: Rendering, layout: PartSpans | None, messages: Sequence[Message], since: int
    ) -> tuple[Span, ...]:
        """Return the ranges with loss. Turns are located only if generation marks do not already give the ranges."""
        if since and (self.loss_type == "all" or self._marked_source is not None):
            begin = self._turn_spans(rendering, layout, [since])[0][0]
            spans = self._spans(rendering, layout, messages, 0)
            return tuple((max(start, begin), end) for start, end in spans if end > begin)
        if self.loss_type == "all":
            silent = [k for k, message in enumerate(messages) if message.train is False]
            return complement(self._turn_spans(rendering, layout, silent), len(rendering.text))
        answers = [k for k, message in enumerate(messages) if message.role == "assistant"]
        wanted = [k for k, m in enumerate(messages) if (m.role == "assistant" if m.train is None else m.train)]
        wanted = [k for k in wanted if k >= since]
        if self._marked_source is None:
            return tuple(self._turn_spans(rendering, layout, wanted))
        marked = layout.marked if layout else marked_spans(self.template, self._marked_source, rendering)
        if wanted == answers:
            return marked
        if len(marked) != len(answers):
            raise UnprovenMaskError(
                f"found {len(marked)} marked ranges for {len(answers)} assistant turns, so train: cannot be applied"
            )
        by_turn = dict(zip(answers, marked, strict=True))
        return tuple(by_turn.get(k) or self._turn_spans(rendering, layout, [k])[0] for k in wanted)

    def _turn_spans(self, rendering: Rendering, layout: PartSpans | None, turns: Sequence[int]) -> list[Span]:
        text = rendering.text
        runs = [(turn, list(run)) for turn, run in groupby(layout.spans if layout else (), key=itemgetter(0))]
        firsts = [run[0][1] for _, run in runs] + [len(text)]
        lasts = [0] + [run[-1][2] for _, run in runs]
        run_of = {turn: index for index, (turn, _) in enumerate(runs)}
        spans = []
        for turn in turns:
            if turn not in run_of:  # no part of it is in the layout
                spans.append(self._turns.span(rendering, turn))
                continue
            # end of the part before the turn, its own first start and last end, start of the part after it
            index = run_of[turn]
            before, start, end, after = lasts[index], firsts[index], lasts[index + 1], firsts[index + 1]
            key = (rendering.messages[turn]["role"], text[before:start], text[end:after])
            if (edges := self._edges.get(key)) is None:
                proved = self._turns.span(rendering, turn)
                edges = (start - proved[0], proved[1] - end)
                if before <= proved[0] <= start and end <= proved[1] <= after:
                    if len(self._edges) >= _MAX_EDGES:
                        self._edges.clear()
                    self._edges[key] = edges
            spans.append((start - edges[0], end + edges[1]))
        return spans


def complement(silent: Sequence[Span], length: int) -> tuple[Span, ...]:
    """Return the ranges of 0..length outside `silent`, which are ascending and disjoint."""
    edges = [0, *(edge for span in silent for edge in span), length]
    return tuple((start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end)


def _check_lost(conversation: Conversation, lost: Iterable[Part]) -> tuple[int, ...]:
    """Return the turns whose reasoning is lost by a template's design: those before the last question or answer.

    Raises DataError for every other part that the template has left out.
    """
    roles = [message.role for message in conversation.messages]
    last = max((k for k, role in enumerate(roles) if role in ("user", "assistant")), default=-1)
    dropped = list[int]()
    for turn, kind in lost:
        if kind == "reasoning" and turn < last:
            dropped.append(turn)
        elif kind != "other":
            where = f"messages[{turn}] ({conversation.messages[turn].role})" if turn >= 0 else "tools"
            what = "them" if kind == "tools" else f"its {kind}"
            raise DataError(
                f"{conversation.origin}: {where}: the chat template drops {what}; choose a template that "
                "renders it (data.template), or remove it from the row"
            )
    return tuple(dropped)
