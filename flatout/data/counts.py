"""What a build counts of rows, how `data show` calls each count, and what a build says of one that is not 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

LOSING = ("truncated", "split", "too_long", "lost_labels")
"""Fates of rows in which the length policy loses tokens, counted as FATE_tokens and FATE_labels."""
Fate = Literal["kept", "truncated", "split", "too_long", "no_labels", "lost_labels", "bad", "equal_rows"]
"""What became of a row; `bad` and `equal_rows` are told by what read it, not by its tokens."""
LISTED = (*LOSING, "no_labels", "typed_control", "equal_rows")
"""What happened to rows that report.json lists by file and row."""
UNITS = ("pairs", "labelled", "groups")
"""Counts of units, of which a set of compared, labelled or sampled answers has one."""


class Count(NamedTuple):
    """How a count is told."""

    label: str = ""
    """Before the number in statistics; "" if it is not shown there."""
    note: str = ""
    """Behind the number in the notes of a build, with other counts and `max_tokens` in braces."""
    note_of_units: str = ""
    """The same for a set of pairs or labelled answers, where it differs."""


COUNTS = {
    "rows": Count("rows read"),
    "bad": Count("bad rows skipped", "bad rows were skipped"),
    "truncated": Count("truncated", "rows were truncated to {max_tokens} tokens"),
    "split": Count("split into windows", "rows were split into windows of {max_tokens} tokens"),
    "too_long": Count(
        "dropped: too long",
        "rows were dropped: too long",
        "rows lost units: an answer is too long, and only whole units are kept",
    ),
    "lost_labels": Count("dropped: no label left after truncation", "rows were dropped: truncation left no label"),
    "no_labels": Count(
        "dropped: no label tokens",
        "rows were dropped: no label tokens",
        "rows lost units: an answer has no label tokens",
    ),
    "equal_rows": Count("dropped: equal to an earlier row", "rows were dropped: equal to an earlier row (data.dedupe)"),
    "duplicates": Count("duplicates", "samples are duplicates; they are kept", "units are duplicates; they are kept"),
    "typed_control": Count(
        "rows with control tokens as text", "rows contain control tokens as text; they were encoded as text"
    ),
    "sorted_results": Count(
        "rows whose results of calls were put in order",
        "rows had results of parallel calls out of order; their ids put them in order",
    ),
    "doubled_markup": Count("rows with markup that the template writes too"),
    "foreign_markup": Count("rows with another model's chat markup"),
    "media_marks": Count("rows with <image> and the like as text"),
    "empty_answers": Count("empty answers, not in the loss", "answers are empty; they do not contribute to the loss"),
    "split_by_question": Count(
        "conversations with a sample for each question (data.lost_reasoning)",
        "conversations became {questions} samples, one for each question: the chat template writes earlier answers "
        "otherwise than inference shows them (data.lost_reasoning=split)",
    ),
    "reasoning_masked": Count(
        "answers without loss, as the template drops their reasoning",
        "answers carry no loss: the chat template drops their reasoning",
    ),
    "reasoning_dropped": Count(
        "turns whose reasoning the template dropped", "turns lost their reasoning: the chat template drops it"
    ),
    "reasoning_as_text": Count(
        note="answers have reasoning in <think> tags, which stay as they are; the chat template writes "
        "reasoning_content otherwise (`flatout data template` shows how)"
    ),
    "unlike_prompt": Count(note="answers follow other text than inference shows: see the chat template's notes"),
    "several_answers": Count(note="rows have several answers; the most frequent, or else the first, is trained"),
    "tabbed_text": Count(
        note="text files have a tab in each line, as tables do, and each is trained as one document; name such a file "
        ".tsv, with a line of column names, to read its columns"
    ),
    "spoken_text": Count(
        note="text files have lines such as User: and Assistant:, and each is trained as one document; for a "
        'conversation, write it as a line of a .jsonl file: {{"messages": [{{"role": "user", "content": "Hi"}}, ...]}}'
    ),
    "transparent_pictures": Count(note="pictures have transparent parts; the image processor fills them"),
    "repeated_prompt": Count(note="answers begin with their prompt, which a model learns to repeat; remove it there"),
}
"""The counts that are told by their number alone, in the order of statistics."""
ALWAYS_COUNTED = (
    *(name for name in COUNTS if name != "transparent_pictures"),
    "kept", "samples", "conversations", "documents", "questions", "tokens", "label_tokens", "deduped_tokens",
    "deduped_labels", "windows_without_labels", "typed_control_tokens", "template_marks", "learnt_control",
    *(f"{fate}_{kind}" for fate in LOSING for kind in ("tokens", "labels")),
)  # fmt: skip
"""Counts that are there also as 0."""


class Size(NamedTuple):
    """Tokens, and how many of them carry loss."""

    tokens: int
    labels: int

    def plus(self, other: Size) -> Size:
        """Return the size of both together."""
        return Size(self.tokens + other.tokens, self.labels + other.labels)


NOTHING = Size(0, 0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to a row."""

    fate: Fate
    """What became of it."""
    num_tokens: int = 0
    """Its length before the length policy; of several samples, that of the longest."""
    size: Size = NOTHING
    """All of its samples before the length policy."""
    lost: Size = NOTHING
    """What the length policy lost of `size`, if the fate is one of LOSING."""
    noticed: Counter[str] = field(default_factory=Counter)
    """What the report counts besides, by its names there."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What happened to the rows of a chunk, together."""

    counts: Counter[str]
    """How often each thing happened, by its name in the report."""
    lengths: Counter[int]
    """Rows of each length in tokens, before the length policy."""
    listed: list[tuple[str, int]]
    """What happened to rows that the report names, and their places in the chunk."""

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Tally:
        """Add up the outcomes of a chunk's rows."""
        counts, lengths, listed = Counter[str](), Counter[int](), list[tuple[str, int]]()
        for place, outcome in enumerate(outcomes):
            fate, is_typed = outcome.fate, outcome.noticed["typed_control_tokens"] > 0
            counts.update(outcome.noticed)
            counts.update(tokens=outcome.size.tokens, label_tokens=outcome.size.labels, typed_control=is_typed)
            if fate in LOSING:
                counts.update({f"{fate}_tokens": outcome.lost.tokens, f"{fate}_labels": outcome.lost.labels})
            if fate != "bad":
                counts[fate] += 1
            if fate not in ("bad", "equal_rows"):
                lengths[outcome.num_tokens] += 1
            listed += [(name, place) for name in [fate] * (fate in LISTED) + ["typed_control"] * is_typed]
        return cls(counts, lengths, listed)
