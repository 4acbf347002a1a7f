"""Prompts that a run answers: as tokens, with the rows that its rewards read, in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from flatout.config.data import DataConfig
from flatout.data.build import Log, Progress, describe, read_chunks, readers_of, tokenizer_for
from flatout.data.build_report import BuildReport, timed
from flatout.data.conversation import Conversation, Origin
from flatout.data.dedupe import without_repeated
from flatout.data.readers import Readers, count_rows, most_rows
from flatout.data.rows.converter import converted
from flatout.data.rows.formats.advice import with_sources
from flatout.data.rows.formats.fields import Row
from flatout.data.rows.formats.parser import RowParser
from flatout.data.rows.formats.prompts import PROMPTED, asks_by_text
from flatout.data.rows.read import RawRow
from flatout.data.rows.sources import open_source
from flatout.data.token_store import StoreMeta
from flatout.data.tokenize import SampleTokenizer
from flatout.data.tokenizer import tokenizer_facts
from flatout.data.workers import tokenize_chunks
from flatout.errors import DataError, Fix, UsageError

# a row with its parser, and its tokens
_Tokenized = tuple[tuple[RawRow, RowParser], NDArray[np.int32]]
# values of settings that say what carries loss, or change texts
_NOT_OF_PROMPTS = ("all", "mask", "train", "text", "truncate", "split")


class RunPrompt(NamedTuple):
    """A prompt: its tokens with what the template writes before an answer, and its turns, role and content.

    `row` has all columns of its row as JSON has them.
    """

    token_ids: tuple[int, ...]
    messages: tuple[dict[str, str], ...]
    row: dict[str, Any]
    origin: Origin
    is_text: bool
    """Whether its row has it as a text, not as turns: TRL tells the two apart."""

    @property
    def text(self) -> str:
        """The prompt as people read it: its only turn, or all turns with their roles."""
        if len(self.messages) == 1:
            return self.messages[0]["content"]
        return "\n".join(f"{turn['role']}: {turn['content']}" for turn in self.messages)


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run by number, each made anew of its row as it is asked for.

    `token_ids` int32 [T] are those of all, each from `offsets` int64 [N + 1] on. `stop_tokens` end an answer in the
    chat template; none without one. `counts` are what became of the rows, by the names of `data.counts`.
    """

    token_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    rows: Sequence[tuple[RawRow, RowParser]]
    meta: StoreMeta
    """What a store of answers to them is made from."""
    stop_tokens: tuple[str, ...]
    counts: Mapping[str, int]
    longer: Sequence[Fix] = ()
    """What keeps those that were too long, if any."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each prompt [N]."""
        return np.diff(self.offsets)

    def ids_of(self, number: int) -> NDArray[np.int32]:
        """Return the tokens of a prompt."""
        return self.token_ids[slice(*self.offsets[number : number + 2])]

    def __getitem__(self, number: int) -> RunPrompt:
        """Return a prompt."""
        raw, parser = self.rows[number]
        sample = parser.parse(raw)
        assert isinstance(sample, Conversation)
        messages = tuple({"role": m.role, "content": m.content} for m in sample.messages)
        is_text, row = asks_by_text(Row(raw.columns, parser.options)), json.loads(_json_of(raw))
        return RunPrompt(tuple(self.ids_of(number).tolist()), messages, row, raw.origin, is_text)

    @cached_property
    def fingerprint(self) -> str:
        """What identifies the prompts: a hash of their tokens and rows, in their order."""
        content = xxhash.xxh3_128(self.offsets.tobytes() + self.token_ids.tobytes())
        for raw, _ in self.rows:
            content.update(_json_of(raw).encode())
        return content.hexdigest()


def read_prompts(
    config: DataConfig,
    model_name: str,
    *,
    limits: Mapping[str, int | None] | None = None,
    progress: Progress = lambda *_: None,
    log: Log = lambda _: None,
) -> PromptSet:
    """Read the prompts of all sources, rendered by the chat template and tokenized; `model_name` has the tokenizer.

    Prompts with more tokens than `data.max_tokens`, or one of `limits` by their settings ("" for none), are dropped and
    counted, or an error (`data.too_long`). Without a chat template, a text is continued as it is. Raises DataError for
    rows, and UsageError for settings, that make no prompts.
    """
    config = _checked(config.with_format(PROMPTED))
    known = {"data.max_tokens": config.max_tokens, **(limits or {})}
    max_tokens, limit = min(((most, name) for name, most in known.items() if most is not None), default=(None, ""))
    name = config.tokenizer or model_name
    facts = tokenizer_facts(name, added=config.added_tokens, log=log)
    with with_sources(config.sources):
        sources = [converted(open_source(source, log), source, log) for source in config.sources]
        # what a converter makes are prompts, too
        asked = [one.model_copy(update={"format": PROMPTED}) for one in config.sources]
        config = config.model_copy(update={"max_tokens": max_tokens, "sources": asked})
        readers = readers_of(config, sources, log)
    meta = describe(config, name, facts, sources)[0]
    to_tokens = tokenizer_for(config, meta, model_name)
    report, prompts = BuildReport(config, lambda: most_rows(readers)), list[_Tokenized]()
    report.limit, report.noun = limit, "prompts"
    prompts += _tokenized(config, readers, to_tokens, report, (progress, log))
    num_distinct = len({xxhash.xxh3_64_intdigest(ids.tobytes()) for _, ids in prompts})
    report.close(len(prompts), num_distinct)
    for text in [f"{one.name}: {said}" for one in sources for said in one.notes()] + report.notes():
        log(text)
    is_rendered = to_tokens.options.template_source is not None and not to_tokens.joins_texts
    stops = to_tokens.description.stops if is_rendered else ()
    offsets = np.cumsum([0, *(len(ids) for _, ids in prompts)], dtype=np.int64)
    rows, ids = [row for row, _ in prompts], np.concatenate([ids for _, ids in prompts])
    return PromptSet(ids, offsets, rows, meta, stops, dict(report.counts), report.longer)


def _tokenized(
    config: DataConfig,
    readers: Readers,
    to_tokens: SampleTokenizer,
    report: BuildReport,
    reporting: tuple[Progress, Log],
) -> Iterator[_Tokenized]:
    """Yield each prompt, as often as it is used, and count what became of the rows in `report`."""
    copies, total = count_rows(config, readers)
    on_chunk = timed(*reporting, 0, total)
    for chunk, read in tokenize_chunks(read_chunks(readers, copies, report), to_tokens, config.num_procs):
        done = without_repeated(read, report.seen)
        report.add(chunk, done)
        pieces = np.split(done.token_ids, np.cumsum(done.lengths))
        for place, row in enumerate(done.sample_row.tolist()):
            raw = chunk.rows[row]
            assert isinstance(raw, RawRow)
            if done.pictures and done.pictures[place]:
                fix = Fix({}, "remove such rows, or their column of pictures, to ask without them")
                raise DataError(f"{raw.origin}: has a picture, which prompts cannot have", [fix])
            yield from [((raw, chunk.parser), pieces[place])] * int(chunk.copies[row])
        on_chunk(report.counts["rows"])


def _checked(config: DataConfig) -> DataConfig:
    """Return settings that make prompts. Raises UsageError for others."""
    if not config.sources:
        raise UsageError("data.sources: no rows to read prompts from; name a file")
    for source in config.sources:
        if source.format != PROMPTED and source.converter is None:
            fix = Fix({"data.sources": [{"path": source.path, "format": PROMPTED}]}, "reads their questions alone")
            raise UsageError(f"{source.path}: format {source.format} is of rows with answers, not of prompts", [fix])
    for name in ("loss_type", "empty_reasoning", "lost_reasoning", "special_tokens", "too_long"):
        value, default = getattr(config, name), DataConfig.model_fields[name].default
        if value != default and value in _NOT_OF_PROMPTS:
            raise UsageError(f"data.{name}={value}: prompts stay whole, as at inference, and have no loss; remove it")
    return config


def _json_of(raw: RawRow) -> str:
    """Return the columns of a row as JSON. Raises DataError for what JSON has not."""

    def as_json(value: Any) -> str:
        if hasattr(value, "isoformat"):
            return str(value.isoformat())
        raise DataError(
            f"{raw.origin}: has a value of type {type(value).__name__}, which rewards do not get; remove it"
        )

    return json.dumps(raw.columns, sort_keys=True, default=as_json)
