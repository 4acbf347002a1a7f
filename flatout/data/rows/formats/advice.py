"""What to set for rows that fit no format: proposals that name every column with meaning, and that were tried."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flatout.config.data import SourceConfig
from flatout.data.conversation import is_in_memory
from flatout.data.rows.formats.fields import Row, SourceOptions
from flatout.data.rows.formats.verdict import two_answers
from flatout.errors import DataError, Fix, as_text

Works = Callable[[Mapping[str, str]], bool]
"""Whether the row can be read with these columns in addition to those that are set."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A sentence on columns that no format reads, and the setting `columns` that makes the row readable, if any.

    `why` is what these do. `is_sure`: the names say so; otherwise the columns are an example with the row's own.
    """

    text: str
    columns: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    is_sure: bool = True


# names that data sets use for what alpaca has, in lower case, the likeliest first
_QUESTIONS = (
    "instruction", "question", "query", "prompt", "input", "problem", "inputs", "input_query", "user", "human"
)  # fmt: skip
_ANSWERS = (
    "output", "answer", "response", "completion", "solution", "targets", "expected_answer", "reply", "assistant", "gpt",
    "answers",
)  # fmt: skip
# what data sets call the better and the worse answer
_PAIRS = (("chosen", "rejected"), ("winner", "loser"), ("preferred", "dispreferred"), ("better", "worse"))
_CONTEXTS = ("input", "context", "passage", "document", "article", "background", "knowledge")
_REASONING = (
    "reasoning", "reasoning_content", "thinking", "thought", "thoughts", "think", "rationale", "cot", "complex_cot",
    "chain_of_thought", "explanation",
)  # fmt: skip
_SYSTEM = ("system", "system_prompt")
# names that are as alike as that are one, mistyped
_TYPO = 0.9
# columns that the format reads under their own names
_READ = ("history", "tools", "functions", "chat_template_kwargs")


def alpaca_columns(row: Mapping[str, Any]) -> tuple[dict[str, str], str] | None:
    """Return columns that make an alpaca row of this one, and a remark; None without a question and an answer.

    Two answers of which one holds the other are one, and otherwise the worked one is the reasoning of the other.
    """
    texts = {
        name: value[0] if isinstance(value, list) else value for name, value in row.items()
        if (isinstance(value, str) and value.strip()) or (name == "answers" and _are_texts(value))
    }  # fmt: skip

    def first(names: Iterable[str], but: Iterable[str | None] = ()) -> str | None:
        present = (own for name in names for own in texts if own.lower() == name and own not in but)
        return next(present, None)

    question = first(_QUESTIONS)
    answer = first(_ANSWERS, (question,))
    if question is None or answer is None:
        return None
    remark, other = "", first(_ANSWERS, (question, answer))
    reasoning = first(_REASONING, (question, answer))
    if other is not None and reasoning is None:
        if texts[answer].strip() in texts[other]:
            answer, remark = other, f"{answer} stands in {other}"
        else:
            reasoning = other
    context = first(_CONTEXTS, (question, answer, reasoning))
    system = first(_SYSTEM, (question, answer, reasoning))
    columns = {"instruction": question, "output": answer}
    columns |= {"input": context} if context not in (None, "input") else {}
    columns |= {"system": system} if system not in (None, "system") else {}
    columns |= {"reasoning": reasoning} if reasoning is not None else {}
    used = {question, answer, context, system, reasoning, *_READ}
    left = [name for name, value in row.items() if value not in (None, "", []) and name not in used]
    if remark:
        left = [name for name in left if not remark.startswith(f"{name} ")]
    return columns, "; ".join(filter(None, [remark, f"not read then: {', '.join(left)}" if left else ""]))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def proposed(row: Mapping[str, Any], works: Works) -> Advice | None:
    """Return what maps a row's columns to alpaca's or to a pair's, None if there is nothing that works."""
    for names in _PAIRS:
        has = [name for name in names if row.get(name) not in (None, "")]
        if len(has) == 1 and "chosen" in names:
            other = names[has[0] == "chosen"]
            return Advice(f"a pair has two answers, but {has[0]!r} stands alone: also write {other!r} in each row")
        asked = [name for name in ("prompt", *_QUESTIONS) if name in row]
        pair = dict(zip(("prompt", "chosen", "rejected"), [*asked[:1], *names], strict=False))
        if len(has) == 2 and "chosen" not in names and works(pair):
            return Advice("no known format has these columns", pair)
    if two := two_answers(row):
        return Advice(
            f"{two[0]} and {two[1]} are two answers, and no column says which is better: write the better one into "
            "chosen and the other into rejected"
        )
    columns = alpaca_columns(row)
    if columns is None or not works(columns[0]):
        return None
    return Advice("no known format has these columns", columns[0], columns[1])


def unread_meaning(row: Row, unread: Iterable[str]) -> str:
    """Return how an alpaca row's unread column of context or reasoning would be read, empty if it has none."""
    columns = {}
    for ours, names in (("input", _CONTEXTS), ("reasoning", _REASONING)):
        taken = ours in row.options.columns or (ours == "input" and row.columns.get("input"))
        theirs = next((name for name in unread if name.lower() in names and isinstance(row.columns[name], str)), None)
        if theirs is not None and not taken:
            columns[ours] = theirs
    return f" (columns={as_text(columns)} reads {', '.join(columns.values())} too)" if columns else ""


def near_miss(missing: Iterable[str], known: Iterable[str], row: Mapping[str, Any], works: Works) -> Advice | None:
    """Return `no column 'messages'; found 'mesages' (did you mean?)` for the closest pair of names, or None.

    `missing` are columns that formats need, `known` all that they read.
    """
    unknown = [key for key in row if key not in set(known)]
    pairs = [
        (difflib.SequenceMatcher(None, name, key).ratio(), name, key)
        for name in missing
        for key in difflib.get_close_matches(name, unknown, n=1, cutoff=0.75)
    ]
    if not pairs:
        return None
    ratio, name, key = max(pairs)
    nearest = {key: name for _, name, key in sorted(pairs)}
    every = {name: key for key, name in nearest.items()}
    if len(every) > 1 and works(every):
        missed = " and ".join(f"{theirs!r} for {ours}" for ours, theirs in every.items())
        return Advice(f"no known format has these columns; found {missed}", every)
    text = f"no column {name!r}; found {key!r} (did you mean?); rename it"
    if works({name: key}):
        return Advice(text, {name: key})
    # a typo, though the row has other faults
    return Advice(text) if ratio >= _TYPO else None


def advised(options: SourceOptions, *ways: Fix) -> tuple[str, list[Fix]]:
    """Return how to change settings of a source: the end of a sentence for rows in memory, which have none; and fixes.

    `ways` have what to add to these settings, under their own names, and settings of the run.
    """
    said, fixes = dict[str, None](), list[Fix]()
    given = {"columns": options.columns, "keys": options.keys, "roles": options.roles}
    for way in ways:
        own = {name: value for name, value in way.settings.items() if name in SourceConfig.model_fields}
        of_run = {name: value for name, value in way.settings.items() if name not in own}
        steps = [f"rename the key `{theirs}` to `{ours}`" for ours, theirs in own.get("columns", {}).items()]
        steps += [f"remove the key `{name}`" for name in own.get("keys", ())]
        if not is_in_memory(options.path):
            own |= {name: {**given[name], **own[name]} for name in given.keys() & own.keys()}
            fixes.append(Fix({"data.sources": [{"path": options.path, **own}], **of_run}, way.why))
        elif of_run:
            fixes.append(Fix(of_run, "; ".join([way.why, *steps])))
        elif steps:
            said[f"; {' and '.join(steps)}"] = None
    return "".join(said), fixes


@contextmanager
def with_sources(sources: Iterable[SourceConfig]) -> Iterator[None]:
    """Raise errors of the body with all sources of a data set in fixes that set one: they are one setting."""
    try:
        yield
    except DataError as error:
        given = [one.model_dump(mode="json", exclude_defaults=True) for one in sources]
        fixes = list[Fix]()
        for fix in error.fixes:
            changed = {one["path"]: one for one in fix.settings.get("data.sources", ())}
            every = [{**one, **changed.get(one["path"], {})} for one in given]
            fixes.append(Fix({**fix.settings, "data.sources": every}, fix.why) if changed else fix)
        error.fixes = tuple(fixes)
        raise
