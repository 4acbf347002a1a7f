"""The labels of a data set for classification: decided before a row is tokenized, the same wherever it is evaluated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from flatout.data.rows.formats.answers import CLASS, CLASSIFY, label_of
from flatout.data.rows.formats.fields import FieldError, Row
from flatout.data.sampling import Readers
from flatout.data.token_store import TokenStore
from flatout.errors import DataError

MAX_LABELS = 2000
_SHOWN = 8


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
    labels = tuple(sorted(counts, key=known.__getitem__)) if counts.keys() <= known.keys() else _ordered(list(counts))
    listing = ", ".join(f"{label} ({counts[label]:,})" for label in labels[:_SHOWN])
    log(f"{len(labels)} labels: {listing}{', ...' if len(labels) > _SHOWN else ''}")
    if alike := alike_labels(labels):
        log(alike)
    return [(source, replace(parser, options=replace(parser.options, classes=labels))) for source, parser in readers]


def alike_labels(labels: Sequence[str]) -> str:
    """Return a sentence on labels that differ in case alone; empty if none do."""
    numbers = Counter(map(str.casefold, labels))
    alike = ", ".join([label for label in labels if numbers[label.casefold()] > 1][:_SHOWN])
    return f"labels that differ in case alone are classes of their own: {alike}; write them alike" if alike else ""


def labels_of(readers: Readers) -> tuple[str, ...]:
    """Return the labels that `with_classes` found; empty without any."""
    return next((parser.options.classes for _, parser in readers if parser.options.classes), ())


def in_order_of(store: TokenStore, labels: Sequence[str]) -> TokenStore:
    """Return a data set with its labels numbered as in `labels`. Raises DataError for a row with another label."""
    own = store.meta.labels
    if not labels or not own or own == tuple(labels):
        return store
    numbers = np.array([labels.index(label) if label in labels else -1 for label in own], np.int32)
    targets = numbers[np.asarray(store.extra[CLASS])]
    if (unknown := np.flatnonzero(targets < 0)).size:
        first = int(unknown[0])
        raise DataError(
            f"{store.origin(first)}: label {own[int(store.extra[CLASS][first])]!r:.60} is none of those that are "
            f"trained ({', '.join(labels[:_SHOWN])}{', ...' if len(labels) > _SHOWN else ''}); {unknown.size:,} of "
            f"{store.num_samples:,} rows of {store.meta.name!r} have such labels: remove them, or train on them too"
        )
    return replace(store, extra={**store.extra, CLASS: targets}, meta=replace(store.meta, labels=tuple(labels)))


def _ordered(labels: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(sorted(labels, key=int))
    except ValueError:
        return tuple(sorted(labels))
