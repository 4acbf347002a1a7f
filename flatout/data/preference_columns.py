"""Data sets of compared, labelled or classified answers: what a set says of its units, and its labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.config.objective import REWARD, UNDESIRABLE
from flatout.data.columns import PREFIX_TOKENS, Column
from flatout.data.rows.formats.answers import CLASS
from flatout.data.token_store import TokenStore
from flatout.errors import DataError

# labels that statistics name
_MOST_SHOWN = 12


def listed(labels: Sequence[str], most: int = 8) -> str:
    """Return the first labels for a sentence."""
    return ", ".join(labels[:most]) + (", ..." if len(labels) > most else "")


def alike_labels(labels: Sequence[str]) -> str:
    """Return a sentence on labels that differ in case alone; empty if none do."""
    numbers = Counter(map(str.casefold, labels))
    alike = ", ".join([label for label in labels if numbers[label.casefold()] > 1][:8])
    return f"labels that differ in case alone are classes of their own: {alike}; write them alike" if alike else ""


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
            f"trained ({listed(labels)}); {unknown.size:,} of {store.num_samples:,} rows of {store.meta.name!r} have "
            "such labels: remove them, or train on them too"
        )
    return replace(store, extra={**store.extra, CLASS: targets}, meta=replace(store.meta, labels=tuple(labels)))


def with_undesirable(store: TokenStore) -> TokenStore:
    """Return the store with the column UNDESIRABLE in memory; a store without labels stays as it is."""
    if "label" not in store.extra:
        return store
    column = Column("int8", "sample", "1: an answer to avoid, 0: one to be learnt", store.columns["label"].fingerprint)
    values = (np.asarray(store.extra["label"]) == 0).astype(np.int8)
    return replace(store, columns={**store.columns, UNDESIRABLE: column}, extra={**store.extra, UNDESIRABLE: values})


def unit_notes(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield how many units a build made of its rows, and how many fell out."""
    if counts["pairs"] or counts["lost_pairs"]:
        lost = counts["lost_pairs"]
        fell = f"; {lost:,} fell out, as one of their answers is too long or has no label" if lost else ""
        yield f"{counts['pairs']:,} pairs of {counts['conversations']:,} rows, a unit each{fell}"
    if counts["groups"] or counts["lost_groups"]:
        lost = counts["lost_groups"]
        fell = f"; {lost:,} fell out, as one of their answers is too long or has no sampled token" if lost else ""
        yield f"{counts['groups']:,} groups of {counts['samples']:,} sampled answers, a unit each{fell}"
    if counts["classified"]:
        yield f"{counts['classified']:,} texts with a label"
    if counts["labelled"]:
        num, num_good = counts["labelled"], counts.get("labelled_good", 0)
        alike = f"; all are {'good' if num_good else 'bad'}, and KTO is meant for both" if num_good in (0, num) else ""
        yield f"{num:,} labelled answers, a unit each{alike}"


def are_good(store: TokenStore, sample_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each of these samples is an answer to be learnt: not a rejected one, nor one whose label is 0."""
    if store.meta.counts.get("pairs"):
        return np.asarray(sample_ids % 2 == 0)
    if store.meta.counts.get("labelled"):
        return np.asarray(store.extra["label"][sample_ids] == 1)
    return np.ones(len(sample_ids), np.bool_)


def first_difference(store: TokenStore, unit: int) -> int:
    """Return at which token the two answers of a pair part, counted from 0."""
    one, other = (store.sample(2 * unit + place).token_ids for place in (0, 1))
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def unit_lines(store: TokenStore) -> Iterator[str]:
    """Yield statistics of pairs and of labels, one sentence each."""
    if store.meta.counts.get("pairs"):
        sizes = store.num_label_tokens.reshape(-1, 2)
        ahead = sizes[:, 0] - sizes[:, 1]
        longer, equal = (float(np.mean(is_case)) for is_case in (ahead > 0, ahead == 0))
        yield f"pairs {len(sizes):,}: chosen is the longer answer in {longer:.1%}, as long in {equal:.1%}"
        yield f"chosen minus rejected, in label tokens: mean {ahead.mean():+.1f}  {_spread(ahead)}"
        common = np.asarray(store.extra[PREFIX_TOKENS], np.int64)
        yield f"tokens that a pair has in common before its labels: {2 * common.sum() / store.lengths.sum():.1%} of all"
    if REWARD in store.extra:
        units = np.arange(store.num_samples + 1) if store.unit_offsets is None else store.unit_offsets
        rewards = np.asarray(store.extra[REWARD])
        ends = [reduce.reduceat(rewards, units[:-1]) for reduce in (np.minimum, np.maximum)]
        equal, sizes = int((ends[0] == ends[1]).sum()), np.diff(units)
        yield f"groups {len(sizes):,}: {sizes.mean():.1f} answers each; rewards are equal in {equal / len(sizes):.1%}"
        yield f"rewards: mean {rewards.mean():.3g}  {_spread(rewards)}"
    if "margin" in store.extra:
        yield f"margins: mean {np.mean(store.extra['margin']):.3g}  {_spread(store.extra['margin'])}"
    if labels := store.meta.labels:
        numbers = np.bincount(np.asarray(store.extra[CLASS]), minlength=len(labels)).tolist()
        most = sorted(zip(numbers, labels, strict=True), reverse=True)
        shown = "  ".join(f"{label} {number:,}" for number, label in most[:_MOST_SHOWN])
        yield f"labels {len(labels):,}: {shown}{'  ...' if len(labels) > _MOST_SHOWN else ''}"
    if store.meta.counts.get("labelled"):
        num_good = int((store.extra["label"] == 1).sum())
        yield f"labels: {num_good:,} answers to be learnt, {store.num_samples - num_good:,} to avoid"


def _spread(values: Any) -> str:
    shares = (5, 25, 50, 75, 95)
    return "  ".join(f"p{s} {v:.4g}" for s, v in zip(shares, np.percentile(values, shares).tolist(), strict=True))
