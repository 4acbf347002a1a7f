"""Markup of chats inside the texts of rows: of another model, or what the template writes once more."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from flatout.data.conversation import Conversation, PlainText
from flatout.data.rows.formats.advice import MEDIA_MARKS

# each is found where all its texts are
_MARKS: tuple[tuple[str, ...], ...] = (
    ("[INST]", "[/INST]"), ("<|im_start|>",), ("<|start_header_id|>",), ("<start_of_turn>",), ("<|turn>", "<turn|>"),
    ("<|user|>", "<|assistant|>"), ("<\uff5cUser\uff5c>",), ("<|start|>", "<|message|>"), ("<|start_of_role|>",),
    ("<|START_OF_TURN_TOKEN|>",), ("### Human:", "### Assistant:"), ("### Instruction:", "### Response:"),
    ("USER:", "ASSISTANT:"), ("\n\nHuman:", "\n\nAssistant:"),
)  # fmt: skip
# every mark holds one of these
_SIGNS = ("<", "[INST]", "###", "USER:", "Human:")
_WRAPPED = re.compile(r"\s*<(\w+)>")


def noticed(
    sample: Conversation | PlainText, text: str = "", skipped: re.Pattern[str] | None = None, template: str = ""
) -> dict[str, int]:
    """Count what was found in reading a row, and its markup: `foreign_markup`, `media_marks` and `doubled_markup`.

    `text` is the rendered conversation; marks that `skipped` matches are tokens here, not text. `markup:[INST]` names a
    mark that was found; `template_marks` are those of a chat template that writes tokens, other than `template`.
    """
    counts = dict.fromkeys(sample.remarks, 1)
    if isinstance(sample, PlainText):
        texts = [sample.prompt, sample.text]
        asked, answer = texts
    else:
        texts = [message.content for message in sample.messages]
        asked, answer = texts[-2:] if texts[1:] and sample.messages[-1].role == "assistant" else ("", "")
        if any(_doubled(sample, text)):
            counts["doubled_markup"] = 1
    if (begin := asked.strip()) and answer.lstrip().startswith(begin):
        counts["repeated_prompt"] = 1
    texts = [content for content in texts if any(map(content.__contains__, _SIGNS))]
    if not texts:  # most rows
        return counts
    marks = {
        mark[0].strip()
        for mark in _MARKS
        for content in texts
        if mark[0] in content and all(map(content.__contains__, mark)) and not (skipped and skipped.search(mark[0]))
    }
    if marks:
        counts |= {"foreign_markup": 1, **{f"markup:{mark}": 1 for mark in marks}}
        counts["template_marks"] = int(any(mark[0] in "<[" and mark not in template for mark in marks))
    if any(map(MEDIA_MARKS.search, texts)):
        counts["media_marks"] = 1
    return counts


def _doubled(sample: Conversation, text: str) -> Iterator[bool]:
    """Yield, for each place where row and template may write the same, whether they do."""
    if not sample.tools and "<" not in text:
        return
    for message in sample.messages:
        if message.role == "system" and sample.tools:
            yield all(f'"{tool["function"]["name"]}"' in message.content for tool in sample.tools)
        elif message.role == "tool" and (tag := _WRAPPED.match(message.content)):
            yield bool(re.search(rf"<{tag[1]}>\s*<{tag[1]}>", text))
        elif message.role == "assistant":
            yield bool(message.tool_calls) and "<tool_call>" in message.content
            yield bool(message.reasoning) and "<think>" in message.content


def markup_notes(counts: Counter[str]) -> Iterator[str]:
    """Yield what a user should know about markup and unread keys, one sentence each."""
    if num := counts["foreign_markup"]:
        marks = ", ".join(sorted(name.removeprefix("markup:") for name in counts if name.startswith("markup:")))
        yield (
            f"{num} rows contain chat markup in their texts ({marks}): it is trained as text, and the turns inside a "
            "text are not told apart; split such rows into turns"
        )
    if num := counts["doubled_markup"]:
        yield (
            f"{num} rows hold markup that the chat template writes too (tools in the system text, <tool_response> "
            "around results, calls or reasoning twice): the model sees it twice; remove it from the texts"
        )
    if num := counts["media_marks"]:
        yield f"{num} rows contain <image>, <video> or <audio>, which other trainers replace; it is trained as text"
    keys = {name.removeprefix("key:"): num for name, num in counts.items() if name.startswith("key:")}
    if keys:
        most = ", ".join(f"{key} ({num} rows)" for key, num in Counter(keys).most_common(20))
        yield f"keys of turns that are not read: {most}" + (f" and {len(keys) - 20} more" if len(keys) > 20 else "")
