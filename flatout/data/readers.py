"""The sources of a data set together: who parses each, their columns and labels, and how often each row is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from flatout.config.schema import DataConfig, SourceConfig
from flatout.data.columns import JUDGEMENTS, Column
from flatout.data.preference_columns import alike_labels, listed
from flatout.data.rows.formats.answers import CLASS, CLASSIFY, JUDGED, label_of
from flatout.data.rows.formats.fields import FieldError, Row
from flatout.data.rows.formats.parser import RowParser, make_parser
from flatout.data.rows.formats.prompts import PROMPTED
from flatout.data.rows.read import RawRow
from flatout.data.rows.sources import RowSource
from flatout.errors import DataError, Fix

Readers = Sequence[tuple[RowSource, RowParser]]
"""Each source with the parser that was chosen from its first rows."""
ROWS_TO_DETECT = 100
MAX_LABELS = 2000


def choose_parsers(sources: Sequence[RowSource], configs: Sequence[SourceConfig]) -> Readers:
    """Pair each source with a parser of the format that its first rows show."""
    return [
        (source, choose_parser(source.name, config, islice(source.rows(lambda _: None), ROWS_TO_DETECT))[0])
        for source, config in zip(sources, configs, strict=True)
    ]


def choose_parser(name: str, config: SourceConfig, rows: Iterator[RawRow]) -> tuple[RowParser, RawRow]:
    """Return a parser, and the row that it is made by. Raises DataError if it can be made by none of the rows."""
    problem = DataError(f"{name}: no rows")
    for number, row in enumerate(rows):
        try:
            return make_parser(config, row), row
        except DataError as error:  # a null in one row does not rule out the others
            problem = problem if number else error
    raise problem


def refuse_prompts(name: str, parser: RowParser) -> None:
    """Raise DataError for rows that are prompts alone, of which nothing can be learnt."""
    if parser.format == PROMPTED:
        raise DataError(
            f"{name} has prompts rows, whose answers a run samples; this one needs answers to learn from: give rows "
            "that have them, with another format",
            [Fix({"objective": "grpo"}, "samples answers, and learns by rollout.rewards")],
        )


def own_columns(config: DataConfig, readers: Readers, log: Callable[[str], None]) -> dict[str, Column]:
    """Return the columns that the rows of all sources fill.

    A margin that only some sources have is left out, which `log` says. Raises DataError for sources of which only some
    hold pairs, or labelled answers, and for settings that would cut an answer or give loss to a prompt.
    """
    kinds = {parser.columns[:1]: (source, parser) for source, parser in reversed(readers)}
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.values())[:2]
        raise DataError(
            f"{one.name} has {first.format} rows and {other.name} {second.format} rows, which no objective takes "
            "together; build them as two data sets"
        )
    source, parser = readers[0]
    refuse_prompts(source.name, parser)
    if parser.format == CLASSIFY:
        if config.too_long == "split":
            fixes = [Fix({"data.too_long": "truncate"}, "cuts them"), Fix({"data.too_long": "drop"}, "leaves them out")]
            raise DataError("data.too_long=split would give a label to parts of a text", fixes)
        return {CLASS: JUDGEMENTS[CLASS]}
    if parser.format not in JUDGED:
        return {}
    if config.loss_type == "all":
        raise DataError(
            f"data.loss_type=all gives loss to prompts, but of {parser.format} rows only answers are learnt",
            [Fix({"data.loss_type": "response_only"})],
        )
    if config.too_long in ("truncate", "split"):
        raise DataError(
            f"data.too_long={config.too_long} would keep a part of an answer, but of {parser.format} rows whole "
            "answers are compared",
            [Fix({"data.too_long": "drop"}, "leaves out longer rows")],
        )
    every = set.intersection(*(set(each.columns) for _, each in readers))
    for name in sorted(set.union(*(set(each.columns) for _, each in readers)) - every):
        lacking = next(source.name for source, each in readers if name not in each.columns)
        log(f"column {name} is left out: {lacking} does not have it")
    return {name: column for name, column in JUDGEMENTS.items() if name in every}


def with_classes(readers: Readers, log: Callable[[str], None]) -> Readers:
    """Give the parsers of labelled texts the labels of all sources: numbers by value, others by their characters.

    Reads all rows once; those without a usable label are told when they are parsed. Raises DataError for
    more than MAX_LABELS.
    """
    counts, known = Counter[str](), dict[str, int]()
    for source, parser in readers:
        if parser.format != CLASSIFY:
            continue
        for row in source.rows(lambda _: None):
            known = known or {
                name: place for place, name in enumerate((row.classes or {}).get(parser.options.name("label"), ()))
            }
            try:
                counts[label_of(Row(row.columns, parser.options))] += 1
            except FieldError:
                continue
            if len(counts) > MAX_LABELS:
                raise DataError(
                    f"{row.origin}: label {list(counts)[-1]!r:.60} is the {len(counts):,}th; a data set may have "
                    f"{MAX_LABELS:,}: name the column of your classes `label`"
                )
    if not counts:
        return readers
    labels = tuple(sorted(counts, key=known.__getitem__)) if counts.keys() <= known.keys() else _ordered(counts)
    log(f"{len(labels)} labels: {listed([f'{label} ({counts[label]:,})' for label in labels])}")
    if alike := alike_labels(labels):
        log(alike)
    return [(source, replace(parser, options=replace(parser.options, classes=labels))) for source, parser in readers]


def _ordered(labels: Iterable[str]) -> tuple[str, ...]:
    try:
        return tuple(sorted(labels, key=int))
    except ValueError:
        return tuple(sorted(labels))


def copies_of_rows(
    num_rows: Sequence[int], weights: Sequence[float], num_samples: int | None, *, shuffle: bool, seed: int
) -> list[NDArray[np.int32]]:
    """Return how often each row is used: one int32 array [num_rows[s]] for each source s.

    Weight w uses every row floor(w) times, and round((w - floor(w)) * n) of the n rows once more, drawn by `seed`.
    `num_samples` then keeps that many of all uses (all, if there are fewer): drawn by `seed`, or the first ones.
    """
    copies = []
    for source, (count, weight) in enumerate(zip(num_rows, weights, strict=True)):
        whole = int(weight)
        uses = np.full(count, whole, dtype=np.int32)
        extra = round((weight - whole) * count)
        uses[np.random.default_rng((seed, 0, source)).permutation(count)[:extra]] += 1
        copies.append(uses)
    total = sum(int(uses.sum()) for uses in copies)
    if num_samples is None or num_samples >= total:
        return copies
    joined = np.concatenate(copies)
    owner = np.repeat(np.arange(len(joined)), joined)
    picked = np.random.default_rng((seed, 1)).permutation(total)[:num_samples] if shuffle else np.arange(num_samples)
    chosen = np.bincount(owner[picked], minlength=len(joined)).astype(np.int32)
    return np.split(chosen, np.cumsum(num_rows)[:-1])


def count_rows(config: DataConfig, readers: Readers) -> tuple[list[NDArray[np.int32]] | None, int | None]:
    """Return how often each row of each source is used (None: once each), and how many are read (None: not known)."""
    weights = [source.weight for source in config.sources]
    if config.num_samples is None and all(weight == 1.0 for weight in weights):
        about = [source.about_rows() for source, _ in readers]
        return None, None if None in about else sum(count or 0 for count in about)
    counts = []
    for source, _ in readers:
        count = source.num_rows
        if count is None:  # bad rows are reported later, when the rows are parsed; their lines count
            count = sum(1 for _ in source.rows(lambda _: None, parse=False))
        counts.append(count)
    copies = copies_of_rows(counts, weights, config.num_samples, shuffle=config.shuffle, seed=config.seed)
    return copies, sum(int((uses > 0).sum()) for uses in copies)


def most_rows(readers: Readers) -> int | None:
    """Return a number that all rows together cannot exceed; None if that is not known before they are parsed."""
    counts = [source.most_rows() for source, _ in readers]
    return None if None in counts else sum(count or 0 for count in counts)
