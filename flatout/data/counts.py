"""What a build counts: how `data show` calls each count, and what a build says of one that is not 0."""

from __future__ import annotations

from typing import NamedTuple

LOSING = ("truncated", "split", "too_long", "lost_labels")
"""Fates of rows in which the length policy loses tokens, counted as FATE_tokens and FATE_labels."""
LISTED = (*LOSING, "no_labels", "typed_control", "equal_rows")
"""What happened to rows that report.json lists by file and row."""


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
