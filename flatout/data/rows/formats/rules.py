"""The formats of rows, one table row each, in the order of detection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from flatout.data.conversation import ParsedRow
from flatout.data.rows.formats import answers, plain, prompts, rollouts
from flatout.data.rows.formats import conversations as chats
from flatout.data.rows.formats.fields import Row, SourceOptions, Uses


@dataclass(frozen=True, slots=True)
class FormatRule:
    """A format of rows."""

    parse: Callable[[Row], ParsedRow]
    required: tuple[tuple[str, ...], ...]
    """One column of each group must be present."""
    optional: tuple[str, ...] = ()
    """Columns that are read too; all others are ignored."""
    named: tuple[str, ...] = ()
    """Keys of turns, and columns that are only read if the user named them."""
    looks: Callable[[Row], bool] = lambda row: True
    """Whether a row whose columns fit is of this format."""
    uses: Callable[[Row], Uses] = lambda row: Uses()
    """What rows like the first one need, and fill."""
    remark: str = ""
    """What the console says, besides the columns."""

    @property
    def columns(self) -> set[str]:
        return {*self.optional, *self.named, *chain(*self.required)}

    def read(self, options: SourceOptions) -> set[str]:
        """Return the user's names of the columns that are read with these settings."""
        named = {options.columns[name] for name in self.named if name in options.columns}
        return named | {options.name(name) for name in (*self.optional, *chain(*self.required))}

    def missing(self, row: Row) -> list[str]:
        """Return the user's names of required columns that are absent from the row (null counts as present)."""
        return [row.name(group[0]) for group in self.required if row.columns.keys().isdisjoint(map(row.name, group))]

    def used(self, row: Row) -> list[str]:
        """Return the user's name of one column per group, preferably one that is not null."""
        groups = [[name for name in map(row.name, group) if name in row.columns] for group in self.required]
        return [next((name for name in names if row.columns[name] is not None), names[0]) for names in groups]


def _converted(*required: str, looks: Callable[[Row], bool] = lambda row: True) -> FormatRule:
    """Return the rule of rows that a converter makes canonical: they are refused, and their fix names it."""
    return FormatRule(_parse_messages, tuple((name,) for name in required), looks=looks)


def _looks_like_gemini(row: Row) -> bool:
    contents = row.get("contents")
    if isinstance(contents, str):
        return contents.lstrip().startswith("[") and '"parts"' in contents
    return isinstance(contents, list) and bool(contents) and isinstance(contents[0], dict) and "parts" in contents[0]


def _looks_like_glaive(row: Row) -> bool:
    chat = row.get("chat")
    return isinstance(chat, str) and "USER:" in chat and "ASSISTANT:" in chat


def _holds_replies(row: Row) -> bool:
    prompt = row.get("prompt")
    return isinstance(prompt, dict) and "replies" in prompt


def _uses_of_tokens(row: Row) -> Uses:
    """Return the masks of tokens: if only some rows had one, the others would train on everything."""
    there = [column for column in plain.TOKEN_COLUMNS if row.get(column) is not None]
    absent = [column for column in plain.TOKEN_COLUMNS if column not in there]
    return Uses(needed=tuple(map(row.name, there)), absent=tuple(map(row.name, absent)))


_TURNS = ("role", "content", "from", "value")
_ASKED = (*answers.PROMPTS, "history", *chats.CHAT_OPTIONAL)
_ANSWERS_ONLY = "both answers get the chat template; only what follows the messages they share carries loss"
_parse_messages = partial(chats.parse_chat, role="role", content="content")
_pairs = FormatRule(
    answers.parse_preference,
    ((*answers.CHOSEN, *chats.CHAT_COLUMNS), answers.REJECTED),
    (*_ASKED, answers.MARGIN, *chain(*answers.SCORES)),
    _TURNS,
    answers.is_pair,
    answers.uses_of_pair,
    _ANSWERS_ONLY,
)
# In the order of detection: distinctive columns first, since many chat sets also have a `text` or `prompt` column.
RULES: dict[str, FormatRule] = {
    "rollouts": FormatRule(
        rollouts.parse_rollouts,
        ((rollouts.GROUP,),),
        (rollouts.PROMPT,),
        looks=rollouts.is_rollout,
        uses=rollouts.uses_of_rollouts,
        remark="a row is a group of sampled answers to one prompt, and only their sampled tokens carry loss",
    ),
    "tokens": FormatRule(plain.parse_tokens, (("input_ids",),), plain.TOKEN_COLUMNS, uses=_uses_of_tokens),
    "oasst": _converted("message_id", "text", "role", looks=lambda row: "parent_id" in row.columns),
    "oasst_trees": _converted("prompt", looks=_holds_replies),
    "segments": FormatRule(plain.parse_segments, (("segments",),)),
    "preference": _pairs,
    "reward": replace(_pairs, remark=""),
    "choice": FormatRule(
        answers.parse_choice,
        (),
        _ASKED,
        _TURNS,
        answers.is_choice,
        answers.uses_of_choice,
        "the better answer is chosen row by row; both get the chat template, and only answers carry loss",
    ),
    "ranked": FormatRule(
        answers.parse_ranked,
        (answers.ANSWERS,),
        (*_ASKED, *answers.RANKED_COLUMNS),
        _TURNS,
        answers.is_ranked,
        answers.uses_of_ranked,
        _ANSWERS_ONLY.replace("both answers", "pairs of answers"),
    ),
    # never detected: a label may also be that of an answer, or mean nothing
    "classify": FormatRule(
        answers.parse_classified,
        (("text", *answers.PROMPTS), ("label",)),
        ("history", *chats.CHAT_OPTIONAL),
        _TURNS,
        lambda row: False,
        lambda row: Uses((answers.CLASS,)),
        "the last token is scored; a chat gets the chat template",
    ),
    "kto": FormatRule(
        answers.parse_kto,
        (answers.LABELS,),
        (*_ASKED, *answers.COMPLETIONS),
        _TURNS,
        answers.is_labelled,
        lambda row: Uses(("label",)),
        "only the answer carries loss, and its label is kept",
    ),
    "messages": FormatRule(
        _parse_messages, (chats.CHAT_COLUMNS,), chats.CHAT_OPTIONAL, ("completion", "role", "content")
    ),
    "sharegpt": FormatRule(
        partial(chats.parse_chat, role="from", content="value"),
        (("conversations", *(name for name in chats.CHAT_COLUMNS if name != "conversations")),),
        chats.CHAT_OPTIONAL,
        ("completion", "from", "value"),
    ),
    "gemini": _converted("contents", looks=_looks_like_gemini),
    "glaive": _converted("chat", looks=_looks_like_glaive),
    "xlam": _converted("query", "tools", "answers"),
    "prompt_completion": FormatRule(
        chats.parse_prompt_completion,
        (("prompt",), ("completion",)),
        chats.CHAT_OPTIONAL,
        ("role", "content"),
        remark="prompt and completion are concatenated, without a chat template or separator (format=alpaca with "
        "columns={instruction: prompt, output: completion} applies the chat template)",
    ),
    "alpaca": FormatRule(
        chats.parse_alpaca, (("instruction",), ("output",)), ("input", "history", *chats.CHAT_OPTIONAL), ("reasoning",)
    ),
    "text": FormatRule(plain.parse_text, (("text",),)),
    # never detected: what carries loss elsewhere is for rewards here
    prompts.PROMPTED: FormatRule(
        prompts.parse_prompt,
        (prompts.ASKED,),
        ("history", *chats.CHAT_OPTIONAL),
        _TURNS,
        lambda row: False,
        remark="the model answers, and rewards get all columns",
    ),
}
ALL_COLUMNS = set[str]().union(*(rule.columns for rule in RULES.values()))
"""Columns that a format reads."""
