"""Finds which characters of a rendered conversation carry loss; each result is proved on the row itself, or refused."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple

from flatout.data.conversation import Conversation, Message, Origin
from flatout.data.loss_mask.parts import Part, PartFinder, PartSpans, marked_spans, with_visible_marks
from flatout.data.loss_mask.probes import (
    ANSWER,
    ASK,
    NEXT,
    Stops,
    closed_reasoning,
    describe,
    empty_reasoning,
    find_stops,
    learnt_end,
    reasoning_forms,
    without_asking,
)
from flatout.data.loss_mask.turns import PROBES, PartRuns, Rendering, Span, TurnFinder, UnprovenMaskError
from flatout.data.templates.description import TemplateDescription
from flatout.data.templates.template import RENDER_ERRORS, TOOLS, ChatTemplate, RawMessage
from flatout.errors import DataError, Fix

_MAX_EDGES = 4096


@dataclass(frozen=True, slots=True)
class MaskedText:
    """A rendered conversation.

    `spans` are the half-open character ranges that carry loss, ascending and disjoint; `typed` those of control tokens
    that are part of the data and must stay text; `lost_reasoning` are the turns whose reasoning the template left
    out because others follow; `num_unlike_prompt` counts the answers that follow other text than inference shows.
    """

    text: str
    spans: tuple[Span, ...]
    typed: tuple[Span, ...]
    lost_reasoning: tuple[int, ...]
    num_unlike_prompt: int = 0


class _Row(NamedTuple):
    """A conversation while its loss is found."""

    rendering: Rendering
    messages: Sequence[Message]
    layout: PartSpans | None
    runs: PartRuns


class Masker:
    """Renders conversations by one template and masks them by one loss type."""

    def __init__(
        self,
        template: ChatTemplate,
        loss_type: Literal["response_only", "all"] = "response_only",
        control: re.Pattern[str] | None = None,
        *,
        mask_empty_reasoning: bool = False,
        end_of_turn: str | None = None,
    ) -> None:
        """Probe the template for its generation prompt and for what ends an answer, or take `end_of_turn` for that.

        Raises DataError if the prompt changes what precedes it, or if an answer has another end.
        """
        self.template = template = without_asking(template)
        self.loss_type = loss_type
        self._control = control
        self._empty_reasoning = empty_reasoning(template) if mask_empty_reasoning else None
        self._turns = TurnFinder(template)
        self._marked_source = with_visible_marks(template)
        self._parts = PartFinder(template, self._marked_source, control)
        # proved once per role and text around a turn: its characters before its parts and after them
        self._edges: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._rewrites: dict[bool, bool] = {}
        # whether an answer follows other text than inference shows, by the text before it
        self._unlike: dict[tuple[Hashable, ...], bool] = {}
        self.stops = Stops()  # while the template's own end is looked for
        self.stops = find_stops(template, self._probe, end_of_turn)
        self._closed = closed_reasoning(template)

    def _probe(self, turns: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[Span]]:
        wanted, self.loss_type = self.loss_type, "response_only"
        try:
            masked = self.mask(Conversation(tuple(turns), Origin("probe", 1), tuple(tools)))
        finally:
            self.loss_type = wanted
        return masked.text, masked.spans

    @cached_property
    def description(self) -> TemplateDescription:
        return describe(self.template, self.stops, self._turns.prompt)

    @cached_property
    def leaves_inline_reasoning(self) -> bool:
        """Whether reasoning in <think> tags in a text looks other than reasoning in a field of its own."""
        return len(set(reasoning_forms(self.template))) > 1

    def end_of_turn(self) -> str:
        """Return what carries loss behind the text of an answer ("<|im_end|>"); empty if nothing does."""
        return learnt_end(self._probe, [ASK, ANSWER], PROBES[0]).partition("\n")[0]

    def rewrites_earlier(self, tools: bool) -> bool:
        """Whether an answer before the last question, in rows with or without tools, stands behind other text than
        inference shows or ends without what stops one, though it does not where no question follows.
        """
        if tools not in self._rewrites:
            first = (ASK, ANSWER)
            alone, whole = (self._like_inference(turns, tools) for turns in (first, (*first, NEXT, ANSWER)))
            self._rewrites[tools] = any(was and not still for was, still in zip(alone, whole, strict=True))
        return self._rewrites[tools]

    def _like_inference(self, turns: Sequence[Message], tools: bool) -> tuple[bool, bool]:
        """Return whether the first answer stands behind what inference shows, and whether it ends with a stop."""
        given = TOOLS if tools else ()
        try:
            text, spans = self._probe(turns, given)
            prompt = self.template.render(self.template.raw_messages(turns[:1]), given, generation_prompt=True)
        except (DataError, *RENDER_ERRORS):
            return False, False
        start, end = next(iter(spans), (0, 0))
        empty = self._empty_reasoning and self._empty_reasoning.match(text, len(prompt), start)
        begins = start in (len(prompt), empty and empty.end()) or self._marked_source is not None
        return text.startswith(prompt) and begins, text[start:end].endswith(self.stops.texts or "")

    def mask(self, conversation: Conversation, since: int = 0) -> MaskedText:
        """Render and mask one conversation; turns before messages[since] carry no loss.

        Raises DataError with the row and the turn if the template refuses it or leaves out a message's text, or if the
        span of a turn cannot be proved.
        """
        messages, raw = conversation.messages, self.template.raw_messages(conversation.messages)
        text = self._render(conversation.origin, raw, conversation.tools)
        rendering = Rendering(self.template, raw, conversation.tools, text)
        is_found = self._marked_source is None and self.loss_type == "response_only"
        try:
            layout = self._parts.find(rendering)
            lost = self._parts.lost(rendering) if layout is None else layout.lost
            lost_reasoning = _check_lost(self.template, conversation, lost)
            row = _Row(rendering, messages, layout, PartRuns(layout.spans if layout else (), text, self.stops.texts))
            spans = self._spans(row, since)
            typed = self._typed(row)
            if self.stops.widens and spans:
                text, spans = self._with_stops(text, spans, messages, typed)
            if layout is not None and is_found:
                _check_learnt(messages, [part for part in layout.spans if part[0] >= since], spans)
            self._check_opened(row, text, {*range(since), *lost_reasoning})
            if any(message.silent for message in messages):
                spans = self._without_silent(row, spans, len(text))
            if self._empty_reasoning is not None:
                matches = ((start, end, self._empty_reasoning.match(text, start, end)) for start, end in spans)
                spans = tuple((empty.end() if empty else start, end) for start, end, empty in matches)
            if self.stops.texts and self.loss_type == "response_only":
                self._check_ended(row, text, spans if self._marked_source is None else _joined(spans))
        except UnprovenMaskError as error:
            said = f"{conversation.origin}: chat template {self.template.name!r}: {error}"
            raise DataError(said, error.fixes) from error
        flat = [position for span in spans for position in span]
        if flat != sorted(flat):
            raise DataError(f"{conversation.origin}: turns overlap in the rendered text; use a different template")
        answers = (k for k, m in enumerate(messages) if k >= since and m.role == "assistant" and m.train is not False)
        kinds = _kinds_before(raw)
        num_unlike = sum(self._is_unlike(row, k, kinds) for k in answers)
        return MaskedText(text, spans, typed, lost_reasoning, num_unlike)

    def _typed(self, row: _Row) -> tuple[Span, ...]:
        """Return the control tokens that are part of the data: all those inside a part.

        Raises UnprovenMaskError if there are some, and the places of the parts are not known.
        """
        rendering, layout = row.rendering, row.layout
        if self._control is None or not self._control.search(rendering.text):
            return ()
        data = "" if layout else json.dumps([rendering.messages, rendering.tools], ensure_ascii=False)
        if control := self._control.search(data):
            raise UnprovenMaskError(f"the data contains {control[0]!r}, which acts on the text around it; remove it")
        parts = [(start, end) for _, start, end in layout.spans] if layout else []
        return tuple(match.span() for part in parts for match in self._control.finditer(rendering.text, *part))

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

    def _spans(self, row: _Row, since: int) -> tuple[Span, ...]:
        """Return the ranges with loss. Turns are located only if generation marks do not already give the ranges."""
        messages = row.messages
        if since and (self.loss_type == "all" or self._marked_source is not None):
            begin = self._turn_spans(row, [since])[0][0]
            return tuple((max(start, begin), end) for start, end in self._spans(row, 0) if end > begin)
        if self.loss_type == "all":
            silent = [k for k, message in enumerate(messages) if message.train is False]
            return complement(self._turn_spans(row, silent), len(row.rendering.text))
        answers = [k for k, message in enumerate(messages) if message.role == "assistant"]
        wanted = [k for k, m in enumerate(messages) if (m.role == "assistant" if m.train is None else m.train)]
        wanted = [k for k in wanted if k >= since]
        if self._marked_source is None:
            return tuple(self._turn_spans(row, wanted))
        for turn in wanted:
            if turn in row.runs:
                row.runs.require_stop(turn)
        marked = row.layout.marked if row.layout else marked_spans(self.template, self._marked_source, row.rendering)
        if wanted == answers:
            return marked
        if len(marked) != len(answers):
            raise UnprovenMaskError(
                f"found {len(marked)} marked ranges for {len(answers)} assistant turns, so train: cannot be applied"
            )
        by_turn = dict(zip(answers, marked, strict=True))
        turn_spans = ([by_turn[k]] if k in by_turn else self._turn_spans(row, [k]) for k in wanted)
        return tuple(chain.from_iterable(turn_spans))

    def _with_stops(
        self, text: str, spans: Sequence[Span], messages: Sequence[Message], typed: Sequence[Span]
    ) -> tuple[str, tuple[Span, ...]]:
        """Let ranges that end without a stop take in the one that follows; an answer that ends a row gets one.

        A stop that is `typed` in the data is text, and ends nothing.
        """
        last, length, ends = messages[-1], len(text.rstrip()), {end for _, end in typed}
        is_ended = text[:length].endswith(self.stops.texts) and length not in ends
        if last.role == "assistant" and spans[-1][1] >= length and not is_ended:
            text += self.stops.after_call if last.tool_calls else self.stops.after_text
        widened = []
        for (start, end), (after, _) in zip(spans, [*spans[1:], (len(text), 0)], strict=True):
            behind = len(text) - len(text[end:].lstrip())
            stop_text = next((stop for stop in self.stops.texts if text.startswith(stop, behind)), "")
            is_ended = text[start:end].endswith(self.stops.texts) and end not in ends
            takes = stop_text and not is_ended and behind + len(stop_text) <= after
            widened.append((start, behind + len(stop_text) if takes else end))
        return text, tuple(widened)

    def _check_opened(self, row: _Row, text: str, unasked: Container[int]) -> None:
        """Raise UnprovenMaskError if reasoning with loss stands behind a block for reasoning that is closed."""
        for turn, message in enumerate(row.messages):
            inline, closed, _ = message.content.partition("</think>")
            thinks = (message.reasoning or (closed and inline.replace("<think>", ""))).strip()
            if not thinks or message.role != "assistant" or message.train is False or turn in unasked:
                continue
            before, own_start = row.runs.around(turn)[:2] if turn in row.runs else (0, 0)
            if shut := self._closed.search(text, before, own_start):
                into = "put it into reasoning_content, or " if closed else ""
                remedy, fixes = self.template.remedy("reasoning")
                raise UnprovenMaskError(
                    f"messages[{turn}] (assistant): the template writes {shut[0]!r} before its reasoning, as for an "
                    f"answer without any; {into}{remedy}",
                    *fixes,
                )

    def _check_ended(self, row: _Row, text: str, spans: Sequence[Span]) -> None:
        """Raise UnprovenMaskError if an answer would be learnt without what stops it, or has it inside, too."""
        messages, runs, parts = row.messages, row.runs, row.layout.spans if row.layout else ()
        ends, stops, starts = [end for _, end in spans], self.stops.texts, {start for _, start, _ in parts}
        own = {turn: runs.around(turn)[2:] for turn, m in enumerate(messages) if m.role == "assistant" and turn in runs}
        answers = []
        for turn, (own_end, after) in own.items():
            span = bisect_left(ends, own_end)
            if span < len(spans) and spans[span][0] < own_end:
                # the last one's stop may have been added behind the text that `runs` is of
                behind = text[own_end : min(ends[span], after if after in starts else ends[span])]
                answers.append((turn, spans[span][0], own_end, behind))
        if not own:  # without its parts, an answer is known by its end alone
            answers = [(-1, 0, 0, stops[0] if text[a:b].endswith(stops) else "") for a, b in spans]
        for turn, start, own_end, behind in answers:
            inside, where = text[start:own_end], f"messages[{turn}] (assistant)" if turn >= 0 else "an answer"
            self._check_behind(behind, where, [m.role for m in messages[turn : turn + 2]] == ["assistant"] * 2)
            if not any(map(inside.count, stops)):
                continue
            for _, first, last in reversed(parts):
                if start <= first and last <= own_end:
                    inside = f"{inside[: first - start]}\0{inside[last - start :]}"
            if stop := next((stop for stop in stops if stop in inside), None):
                raise UnprovenMaskError(
                    f"{where}: {stop!r}, which ends an answer, is inside it; use a template that writes an answer "
                    "as one turn (data.template)"
                )

    def _check_behind(self, behind: str, where: str, goes_on: bool) -> None:
        """Raise UnprovenMaskError unless a stop, and no text of another turn, is learnt behind an answer."""
        stop = next((stop for stop in self.stops.texts if stop in behind), None)
        if stop and re.search(r"\w", self.template.markup.sub("", behind.partition(stop)[2])):
            raise UnprovenMaskError(
                f"{where}: {behind!r} follows it, and is not of it; use another template (data.template)"
            )
        # earlier answers may have an end of their own
        if stop or self._turns.has_marker(behind, self.stops.texts):
            return
        if goes_on:
            raise UnprovenMaskError(
                f"{where}: another answer follows, and nothing ends this one; join the two into one message"
            )
        raise UnprovenMaskError(
            f"{where}: nothing ends it where other messages follow, so a model would not learn to stop; use "
            "another template (data.template)",
            Fix({"data.lost_reasoning": "split"}, "makes each question a sample of its own"),
        )

    def _without_silent(self, row: _Row, spans: Sequence[Span], length: int) -> tuple[Span, ...]:
        """Return the ranges with loss without the silent ranges of messages, which must be in the text unchanged."""
        silent, text = list[Span](), row.rendering.text
        for turn, message in enumerate(row.messages):
            if not message.silent:
                continue
            own = self._turn_spans(row, [turn])
            start, end = own[0][0], own[-1][1]
            inner = message.content.strip()
            at = text.find(inner, start, end)
            if at < 0 or text.find(inner, at + 1, end) >= 0:
                raise UnprovenMaskError(
                    f"the text of messages[{turn}] is not once in its turn, so its ranges are unknown"
                )
            at -= message.content.index(inner)
            silent += [(max(at + first, start), min(at + after, end)) for first, after in message.silent]
        carrying = complement([span for span in silent if span[0] < span[1]], length)
        both = ((max(a, c), min(b, d)) for a, b in spans for c, d in carrying)
        return tuple((start, end) for start, end in both if start < end)

    def _turn_spans(self, row: _Row, turns: Sequence[int]) -> list[Span]:
        rendering, runs, text, spans = row.rendering, row.runs, row.rendering.text, list[Span]()
        for turn in turns:
            if turn not in runs:  # no part of it is in the layout
                spans.append(self._turns.span(rendering, turn))
                continue
            runs.require_stop(turn)
            before, start, end, after = runs.around(turn)
            key = (rendering.messages[turn]["role"], text[before:start], text[end:after])
            if (edges := self._edges.get(key)) is None:
                proved = self._turns.proved(rendering, turn, runs)
                edges = (start - proved[0], proved[1] - end)
                if before <= proved[0] <= start and end <= proved[1] <= after:
                    if len(self._edges) >= _MAX_EDGES:
                        self._edges.clear()
                    self._edges[key] = edges
            spans += runs.without_foreign((start - edges[0], end + edges[1]), turn)
        return spans

    def _is_unlike(self, row: _Row, turn: int, kinds: Sequence[Hashable]) -> bool:
        """Return whether an answer follows other text than inference shows; told once for the text before a turn.

        What precedes its question counts by its `kinds` alone.
        """
        rendering, runs = row.rendering, row.runs
        text, messages = rendering.text, rendering.messages
        if turn not in runs:
            shown = rendering.attempt(messages[:turn], prompt=True)
            return shown is not None and not text.startswith(shown)
        asked = max((k for k in range(turn) if messages[k]["role"] == "user" and k in runs), default=turn)
        _, gaps = runs.between(asked, turn)
        key: tuple[Hashable, ...] = (bool(rendering.tools), kinds[asked], turn == len(messages) - 1)
        key += (*(m["role"] for m in messages[asked:turn]), *(text[a:b] for a, b in gaps))
        if (unlike := self._unlike.get(key)) is None:
            shown = rendering.attempt(messages[:turn], prompt=True)
            unlike = shown is not None and not text.startswith(shown)
            if shown is not None and turn and messages[turn - 1]["role"] in ("assistant", "tool"):
                unlike = not self._turns.asks_again(text, shown, runs.around(turn)[1])
            if len(self._unlike) >= _MAX_EDGES:
                self._unlike.clear()
            self._unlike[key] = unlike
        return unlike


def _kinds_before(messages: Sequence[RawMessage]) -> list[frozenset[Hashable]]:
    """Return what is before each message by its kind: who follows whom, with what."""
    kinds, known = [frozenset[Hashable]()], frozenset[Hashable]()
    for one, two in pairwise([{"role": ""}, *messages]):
        pair = (one["role"], two["role"], "</think>" in two["content"], *two)
        known = known if pair in known else known | {pair}
        kinds.append(known)
    return kinds


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Return ranges without the edges at which one follows another: marks may stand around each part of an answer."""
    edges = Counter(edge for span in spans for edge in span)
    ends = [edge for edge, times in edges.items() if times == 1]
    return list(zip(ends[::2], ends[1::2], strict=True))


def complement(silent: Sequence[Span], length: int) -> tuple[Span, ...]:
    """Return the ranges of 0..length outside `silent`, which are ascending and disjoint."""
    edges = [0, *(edge for span in silent for edge in span), length]
    return tuple((start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end)


def _check_learnt(messages: Sequence[Message], parts: Iterable[tuple[int, int, int]], spans: Sequence[Span]) -> None:
    """Raise UnprovenMaskError if part of an answer with loss, (turn, start, end), is in none of the spans."""
    starts = [start for start, _ in spans]
    for turn, start, end in parts:
        span = bisect_right(starts, start) - 1
        is_learnt = messages[turn].role == "assistant" and messages[turn].train is not False
        if is_learnt and (span < 0 or spans[span][1] < end):
            raise UnprovenMaskError(
                f"part of an answer ({messages[turn].content[:40]!r}) is outside the range found for its turn; "
                "use a template that writes an answer as one turn"
            )


def _check_lost(template: ChatTemplate, conversation: Conversation, lost: Iterable[Part]) -> tuple[int, ...]:
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
            what = "them" if kind == "tools" else "part of it" if kind == "cut" else f"its {kind}"
            remedy, fixes = template.remedy(kind)
            raise DataError(f"{conversation.origin}: {where}: the chat template drops {what}; {remedy}", fixes)
    return tuple(dropped)
