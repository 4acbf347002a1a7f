"""Renders probes to find out how a template writes a conversation: see templates.description."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from flatout.data.conversation import Message, ToolCall
from flatout.data.loss_mask.turns import PROBES, Span, shared_length
from flatout.data.templates.description import (
    EARLIER,
    Mismatch,
    Problem,
    StopsFrom,
    TemplateDescription,
    Treatment,
    brief,
)
from flatout.data.templates.template import REASONING_SWITCHES, THOUGHT, TOOL_NAME, TOOLS, ChatTemplate
from flatout.errors import DataError, as_text

Mask = Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], tuple[str, Sequence[Span]]]
"""Renders messages with tools; returns the text and the ranges of its answers. Raises DataError."""

_SHARED_CHARS = 40  # shown of what two texts have in common
QUESTION = "AskprobefourMnb"
ASK, ANSWER, NEXT = Message("user", QUESTION), Message("assistant", PROBES[0]), Message("user", "b")
CALL = Message("assistant", "", tool_calls=(ToolCall(TOOL_NAME, {"x": PROBES[1]}, "call00000"),))
CALLS = replace(CALL, tool_calls=CALL.tool_calls * 2)
RESULT = Message("tool", PROBES[0], name=TOOL_NAME, tool_call_id="call00000")


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends an answer: after its text, and after a call. Both are empty if nothing does.

    `widens` says that a turn's range may end before its stop, or a row without one: then the masker adds it.
    """

    after_text: str = ""
    after_call: str = ""
    widens: bool = False
    source: StopsFrom = "nothing"

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for text in (self.after_text, self.after_call) if text))


def find_stops(template: ChatTemplate, mask: Mask, end_of_turn: str | None) -> Stops:
    """Return what ends an answer of a template: its own end, `end_of_turn`, or the marker that opens the next turn.

    Raises DataError if the template has an end of its own, and `end_of_turn` is not exactly the stop in it.
    """
    markup, tokens = template.markup, template.tokens
    last = learnt_end(mask, [ASK, ANSWER], PROBES[0])
    earlier = learnt_end(mask, [ASK, ANSWER, NEXT], PROBES[0])
    own = last or earlier or _marker(template, [ASK, ANSWER], PROBES[0])
    marker = _marker(template, [ASK, ANSWER, NEXT], PROBES[0])
    # an end that only the last answer lacks: the next turn's marker would open the first, and end no question
    opened, _, asked = template.attempt([ASK]).partition(QUESTION)
    if not own and (marker not in opened or marker in asked):
        own = marker
    if end_of_turn not in (None, "none") and not own:
        return Stops(end_of_turn, end_of_turn, True, "setting")
    between = "".join(template.attempt([ASK, CALLS], TOOLS).split(PROBES[1])[1:-1])
    if own:
        # the last token of an end of several: the first may stand behind reasoning, too; some end only the whole text
        ends = [match[0] for match in markup.finditer(own)]
        ends = [end for end in ends if end in earlier] or ends
        after_text = next((end for end in reversed(ends) if end in tokens), ends[0] if ends else own)
        if end_of_turn not in (None, after_text):
            whole = "" if own == after_text else f", of which {after_text!r} stops it"
            raise DataError(
                f"data.end_of_turn {end_of_turn!r}: chat template {template.name!r} ends an answer with {own!r}{whole}"
                "; remove the setting, or choose another template"
            )
        # a template may write calls, and leave out the tools
        call = learnt_end(mask, [ASK, CALL], PROBES[1], TOOLS) or learnt_end(mask, [ASK, CALL], PROBES[1])
        # a call is closed by tags of its own, and stopped by the last of them, unless that stands between two calls, or
        # is no token
        tags = [tag[0] for tag in markup.finditer(call) if tag[0] in (*tokens, after_text) or tag[0][1] != "/"][-1:]
        is_cut = bool(call) and (not tags or tags[0] in between)
        if is_cut:
            answered = [ASK, CALL, RESULT, replace(ANSWER, content="b")]
            tags = [_marker(template, turns, PROBES[1] + call) for turns in ([ASK, CALL], answered)]
        after_call = (*filter(None, tags), after_text)[0]
        return Stops(after_text, after_call, not last or is_cut, "template")
    if end_of_turn == "none" or not marker:
        return Stops()
    closed = template.attempt([ASK, CALL], TOOLS).partition(PROBES[1])[2].rstrip()
    after_call = _marker(template, [ASK, CALL, RESULT, ANSWER], PROBES[1] + closed)
    # where the result follows inside of the turn, a token of its own closes the call
    closing = [tag for tag, special in tokens.items() if special and closed.endswith(tag) and tag not in between]
    return Stops(marker, (*filter(None, [after_call]), *closing, marker)[0], True, "next turn")


def without_asking(template: ChatTemplate) -> ChatTemplate:
    """Return a template whose texts end with their last message, though it asks for an answer behind each text."""
    asked, shown = template.attempt([ASK]), template.attempt([ASK], prompt=True)
    last = template.attempt([ASK, ANSWER]).partition(PROBES[0])[2]
    earlier = template.attempt([ASK, ANSWER, NEXT]).partition(PROBES[0])[2]
    end = shared_length(last, earlier)
    end = next((m.start() for m in template.markup.finditer(last) if m.start() < end < m.end()), end)
    # both may go on with what opens every turn: the first of a text begins with that
    opening = {tag[0] for tag in _run(template.markup, asked)} - {template.tokenizer.eos_token}
    while (tags := list(template.markup.finditer(last, 0, end))) and tags[-1].end() == end and tags[-1][0] in opening:
        end = tags[-1].start()
    asks = last[end:]
    is_added = earlier and asks.strip() and asked.endswith(asks) and shown.startswith(asked)
    return replace(template, asks=asks) if is_added else template


def _run(markup: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yield the tags with which a text begins."""
    end = 0
    while match := markup.match(text, len(text) - len(text[end:].lstrip())):
        yield match
        end = match.end()


def learnt_end(mask: Mask, turns: Sequence[Message], probe: str, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return what carries loss behind the probe of an answer, without white space around it."""
    try:
        text, spans = mask(turns, tools)
    except DataError:
        return ""
    begin = end = text.rfind(probe) + len(probe)
    for start, stop in spans:  # generation marks may stand around each part of an answer
        if start <= end <= stop:
            end = stop
    return text[begin:end].strip()


def _marker(template: ChatTemplate, turns: Sequence[Message], behind: str) -> str:
    """Return the token that stands behind a text, if the tokenizer has it: a text of several tokens stops nothing."""
    text = template.attempt(turns, TOOLS if CALL in turns else ())
    match = template.markup.match(text.rpartition(behind)[2].lstrip()) if behind in text else None
    return match[0] if match and match[0] in template.tokens else ""


def unknown_marker(template: ChatTemplate) -> str:
    """Return what looks like the marker of the next turn, though the tokenizer has no such token; empty if nothing."""
    text = template.attempt([ASK, ANSWER, NEXT]).partition(PROBES[0])[2].lstrip()
    match = template.markup.match(text)
    return match[0] if match else ""


def reasoning_tags(template: ChatTemplate) -> tuple[str, str]:
    """Return the tags that a template writes around reasoning; <think> and </think> if it writes none."""
    opened, _, closed = template.attempt([ASK, replace(ANSWER, reasoning=THOUGHT)]).partition(THOUGHT)
    starts = [match.start() for match in template.markup.finditer(opened)]
    end = template.markup.search(closed.partition(PROBES[0])[0])
    return ("<think>", "</think>") if not starts or end is None else (opened[starts[-1] :].strip(), end[0])


def empty_reasoning(template: ChatTemplate) -> re.Pattern[str]:
    """Return a pattern of reasoning without text, whole, or as the close of what the generation prompt opens."""
    begin, close = map(re.escape, reasoning_tags(template))
    return re.compile(rf"\s*(?:{begin}\s*)?{close}\s*")


def reasoning_forms(template: ChatTemplate) -> Iterator[str]:
    """Yield what a template makes of an answer with reasoning in a field, and in <think> tags, if it shows it."""
    inline = f"<think>\n{THOUGHT}\n</think>\n\n{PROBES[0]}"
    for answer in (replace(ANSWER, reasoning=THOUGHT), replace(ANSWER, content=inline)):
        if THOUGHT in (text := template.attempt([ASK, answer])):
            yield text


def closed_reasoning(template: ChatTemplate) -> re.Pattern[str]:
    """Return a pattern of what closes reasoning, and nothing else."""
    tag = reasoning_tags(template)[1]
    own = () if tag in template.attempt([ASK]) else (tag,)
    return re.compile("|".join(["</[^<>/]*think[^<>]*>", *map(re.escape, own)]))


def describe(template: ChatTemplate, stops: Stops, prompt: str) -> TemplateDescription:
    """Return the description of a template whose stops and generation prompt are known."""
    stem = template.attempt([ASK], prompt=True).removesuffix(prompt)
    opens, _, ends = template.attempt([ASK, ANSWER]).partition(PROBES[0])
    thought = template.attempt([ASK, replace(ANSWER, reasoning=THOUGHT)])
    opened, _, closed = thought.partition(THOUGHT)
    shared = shared_length(opens, stem + prompt.partition(reasoning_tags(template)[0])[0])
    empty = re.compile(f"{empty_reasoning(template).pattern}$").search(opens, shared)
    earlier = [ASK, replace(ANSWER, reasoning=THOUGHT), NEXT, ANSWER]
    answered = [ASK, CALL, replace(RESULT, content=THOUGHT), ANSWER]
    by_text = dict[tuple[str, str], Mismatch]()
    mismatches = list(find_mismatches(template))
    for mismatch in mismatches:
        by_text.setdefault((mismatch.trained, mismatch.shown), mismatch)
    return TemplateDescription(
        name=template.name,
        opens=opens.removeprefix(stem),
        prompt=prompt,
        ends=ends,
        stops=stops.texts,
        stops_from=stops.source,
        reasoning=(opened.removeprefix(stem), closed.partition(PROBES[0])[0]) if closed else ("", ""),
        empty_reasoning=empty[0] if empty else "",
        last_reasoning=_treatment(thought, THOUGHT),
        earlier_reasoning=_treatment(template.attempt(earlier), THOUGHT),
        system=_treatment(template.attempt([Message("system", THOUGHT), ASK, ANSWER]), THOUGHT),
        tools=_treatment(template.attempt([ASK, ANSWER], TOOLS), TOOL_NAME),
        calls=_treatment(template.attempt([ASK, CALL], TOOLS), PROBES[1]),
        results=_treatment(template.attempt(answered, TOOLS), THOUGHT),
        mismatches=tuple(by_text.values()),
        problems=tuple(_problems(template, stops, by_text.values(), {mismatch.answer for mismatch in mismatches})),
    )


def _treatment(text: str, probe: str) -> Treatment:
    return "refused" if not text else "written" if probe in text else "dropped"


def find_mismatches(template: ChatTemplate) -> Iterator[Mismatch]:
    """Yield the kinds of answers before which inference shows other text than training does."""
    other = replace(ANSWER, content=PROBES[1])
    kinds: dict[str, tuple[list[Message], int, Sequence[Mapping[str, Any]]]] = {
        "the last answer": ([ASK, ANSWER], 1, ()),
        EARLIER: ([ASK, ANSWER, NEXT, other], 1, ()),
        "an answer with reasoning": ([ASK, replace(ANSWER, reasoning=THOUGHT)], 1, ()),
        "an answer after a tool result": ([ASK, CALL, replace(RESULT, content=THOUGHT), ANSWER], 3, TOOLS),
        "an answer with tools": ([ASK, ANSWER], 1, TOOLS),
        "an answer to a later question": ([ASK, other, NEXT, ANSWER], 3, ()),
    }
    differs = False  # then answers with more around them do, too
    for kind, (turns, turn, tools) in kinds.items():
        if differs and kind in list(kinds)[-2:]:
            continue
        text, shown = template.attempt(turns, tools), template.attempt(turns[:turn], tools, prompt=True)
        if text.startswith(shown) or PROBES[0] not in text:  # also of what the template refuses
            continue
        probe = THOUGHT if turns[turn].reasoning and THOUGHT in text else PROBES[0]
        first = text.rfind(probe) if turn == 3 else text.find(probe)
        plain = template.attempt(turns[:turn], tools)
        base = len(plain)
        if not (text.startswith(plain) and shown.startswith(plain)):  # the last line that both share, or a part of it
            shared = shared_length(text, shown)
            base = max(text.rfind("\n", 0, shared) + 1, shared - _SHARED_CHARS)
        yield Mismatch(kind, text[base:first], shown[base:])
        differs |= kind == "the last answer"


def _problems(
    template: ChatTemplate, stops: Stops, mismatches: Iterable[Mismatch], unequal: Set[str]
) -> Iterator[Problem]:
    if stops.source == "nothing":
        yield Problem(
            "nothing that it writes ends an answer, so a model would not learn to stop",
            "set data.end_of_turn to the token that ends one, such as the tokenizer's eos",
        )
    elif stops.source == "next turn":
        yield Problem(
            f"it ends no answer itself: {stops.after_text!r}, which opens the next turn, stops one",
            "it carries loss and is added behind the last answer; to choose another, set data.end_of_turn",
        )
    for mismatch in mismatches:
        trained, shown = brief(mismatch.trained), brief(mismatch.shown)
        what = f"{mismatch.answer} is trained after {trained}, but inference shows {shown}"
        yield Problem(what, _remedy(template, mismatch, unequal), mismatch.answer)


def _remedy(template: ChatTemplate, mismatch: Mismatch, unequal: Set[str]) -> str:
    """Return what makes training and inference equal: a variable of the template, or another template.

    `unequal` are all kinds of answers that differ now. A variable must add none, or it suits rows without these alone.
    """
    for_some = ""
    for name in REASONING_SWITCHES:
        for value in (True, False):
            if not re.search(rf"\b{name}\b", template.source) or template.args.get(name) == value:
                continue
            try:
                args = {**template.args, name: value}
                switched = ChatTemplate.checked(template.name, template.source, template.tokenizer, args)
            except DataError:
                continue
            left = {other.answer for other in find_mismatches(switched)}
            setting = f"data.template_args={as_text({name: value})} makes them equal"
            if left < unequal and mismatch.answer not in left:
                return setting
            if mismatch.answer not in left and not for_some:
                new = sorted(left - unequal)
                others = ["an answer without reasoning"] if "the last answer" in new else new
                for_some = (
                    f"{setting}, but {' and '.join(others)} would then differ: set it if no row has one, or give it to "
                    "the other rows alone, as chat_template_kwargs"
                )
    if for_some:
        return for_some
    if mismatch.answer == EARLIER:
        return "data.lost_reasoning=split (the default) makes each question a sample of its own, as inference shows it"
    return (
        "no variable of the template makes them equal: set data.template to a copy of it (.jinja) that adds the first "
        "text to ask for an answer"
    )
