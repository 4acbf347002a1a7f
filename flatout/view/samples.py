"""The page of a data set: its samples with trained and context tokens, how they pack, statistics and warnings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.config.objective import REWARD
from flatout.config.schema import BatchConfig
from flatout.data.counts import COUNTS
from flatout.data.pictures.show import picture_lines, thumbnails
from flatout.data.statistics import padding_share
from flatout.data.token_store import TokenStore
from flatout.errors import DataError
from flatout.io.json_file import read_as
from flatout.planner.cost import COST_BY_TOKENS
from flatout.planner.steps.step_plan import BatchLayout
from flatout.planner.steps.training_plan import make_plan, select_samples
from flatout.track.figures import short_count
from flatout.view.charts import histogram, packing_lanes
from flatout.view.page import page, render, text, visible

NUM_LENGTH_BINS, NUM_PACKED_STEPS = 48, 4
# the budget of a micro-batch on a CPU, where a run does not choose one by its memory; and the default seed
MICRO_BATCH_TOKENS, SEED = 8192, 42

Decode = Callable[[list[int]], str]
# a piece of a sample, and whether the loss counts its tokens
Piece = tuple[str, bool]


@dataclass(frozen=True, slots=True)
class _Report:
    """What the page reads of report.json: notes, and row numbers by what happened to them, then by file."""

    notes: tuple[str, ...]
    rows: Mapping[str, Mapping[str, tuple[int, ...]]]


def samples_page(store: TokenStore, decode: Decode, count: int) -> str:
    """Return the page of a store with its first `count` samples."""
    count = min(count, store.num_samples)
    title = f"<h1>{text(store.meta.name)}</h1>"
    samples = (
        f'<section id="samples"><h2>The first {count:,} samples</h2>{sample_list(store, decode, 0, count)}</section>'
    )
    body = title + overview(store) + statistics(store) + (samples if count else "")
    return page(f"{store.meta.name} · flatout", body)


def overview(store: TokenStore) -> str:
    """Return how a store was built, its headline figures and warnings."""
    meta, lengths, num_labels = store.meta, store.lengths, int(store.num_label_tokens.sum())
    template = f"template {meta.template or 'none'}, end of turn {meta.end_of_turn or 'none'!r}"
    parts = (", ".join(meta.sources), f"tokenizer {meta.tokenizer}", template, meta.limits.removesuffix("; "))
    lead = " · ".join(filter(None, parts))
    num_tokens, half, most = int(lengths.sum()), int(np.median(lengths)), int(lengths.max())
    percentile = int(np.percentile(lengths, 95, method="higher"))
    figures = [
        ("Samples", f"{store.num_samples:,}", ""),
        ("Tokens", short_count(num_tokens), f"{num_tokens:,}"),
        ("Trained tokens", f"{num_labels / num_tokens:.1%}", f"{num_labels:,} carry the loss"),
        ("Median length", f"{half:,}", f"tokens; 95% have at most {percentile:,}, the longest {most:,}"),
        ("Padding avoided", f"{padding_share(lengths, 32):.1%}", "of the tokens in padded batches of 32"),
    ]
    return render("overview.html", lead=lead, figures=figures, notes=_read_report(store).notes)


def statistics(store: TokenStore) -> str:
    """Return the lengths of samples, how they pack, and row outcomes."""
    counts = store.meta.counts
    fates = [(how.label, f"{counts[name]:,}") for name, how in COUNTS.items() if how.label and counts.get(name)]
    edges = np.unique(np.linspace(0, int(store.lengths.max()) + 1, NUM_LENGTH_BINS + 1).astype(np.int64))
    numbers = np.histogram(store.lengths, edges)[0]
    lengths = histogram("Sample lengths", "samples", edges.tolist(), numbers.tolist(), "tokens in a sample")
    # the first steps that a run with default settings would take on one CPU
    units = store.unit_offsets
    largest = store.lengths if units is None else np.add.reduceat(store.lengths, units[:-1])
    budget, batch = max(MICRO_BATCH_TOKENS, int(largest.max())), BatchConfig()
    layout = BatchLayout(1, budget, COST_BY_TOKENS)
    plan = make_plan(select_samples(store.lengths, store.num_label_tokens, None, layout, units), layout, batch, SEED)
    steps = [plan.step(index) for index in range(min(NUM_PACKED_STEPS, plan.num_steps))]
    samples = [
        [[store.lengths[list(one.sample_ids)].tolist() for one in rank] for rank in step.by_rank] for step in steps
    ]
    packing = packing_lanes(samples, [plan.naive_batches(step) for step in steps])
    return render("statistics.html", lengths=lengths, packing=packing, budget=budget, outcomes=fates)


def sample_list(store: TokenStore, decode: Decode, first: int, count: int) -> str:
    """Return up to `count` samples from number `first` on, turn by turn."""
    report = _read_report(store)
    numbers = range(first, min(first + count, store.num_samples))
    return render("samples.html", samples=[_sample(store, index, decode, report) for index in numbers])


def _read_report(store: TokenStore) -> _Report:
    if not store.meta.counts:  # not built from rows
        return _Report((), {})
    path = store.folder / "report.json"
    try:
        return read_as(_Report, path, DataError)
    except DataError as error:
        return _Report((f"{error}; truncated rows are not marked; rebuild the data set to see them",), {})


def _sample(store: TokenStore, index: int, decode: Decode, report: _Report) -> tuple[Any, ...]:
    """Return number, what happened to the row, origin, tokens, trained tokens, turns as HTML, and pictures."""
    token_ids, loss_mask = store.sample(index).pair
    origin = store.origin(index)
    fates = [
        fate for fate in ("truncated", "split") if origin.row_number in report.rows.get(fate, {}).get(origin.source, ())
    ]
    if store.meta.counts.get("pairs"):
        fates.insert(0, ("chosen", "rejected")[index % 2])
    fates[:0] = [f"{name} {store.extra[name][index]:g}" for name in ("label", REWARD) if name in store.extra]
    runs = np.split(np.arange(len(token_ids)), np.flatnonzero(np.diff(loss_mask)) + 1)
    pieces = [(decode(token_ids[run].tolist()), bool(loss_mask[run[0]])) for run in runs]
    turns = [_turn(turn) for turn in split_turns(pieces, store.meta.end_of_turn)]
    copies = thumbnails(store.pictures(index)) if store.num_pictures else ()
    shown = zip(picture_lines(store, index), copies, strict=True)
    return index + 1, fates, origin, len(token_ids), int(store.num_label_tokens[index]), turns, list(shown)


def split_turns(pieces: Sequence[Piece], end_of_turn: str) -> Iterator[list[Piece]]:
    """Yield the pieces of each turn: up to `end_of_turn` and the line breaks after it, or all if there is none."""
    whole = "".join(piece for piece, _ in pieces)
    ends = [match.end() for match in re.finditer(re.escape(end_of_turn) + r"\n*", whole)] if end_of_turn else []
    turn: list[Piece] = []
    place = 0
    for piece, is_trained in pieces:
        while ends and ends[0] <= place + len(piece):
            cut = ends.pop(0) - place
            yield [*turn, (piece[:cut], is_trained)]
            turn, piece, place = [], piece[cut:], place + cut
        if piece:
            turn.append((piece, is_trained))
        place += len(piece)
    if turn:
        yield turn


def _turn(pieces: Sequence[Piece]) -> str:
    """Return a turn, its spaces, tabs and line breaks marked faintly; copied text stays the same."""
    spaces = {" ": "<i> </i>", "\t": '<i class="tab">\t</i>', "\n": '<i class="end"></i>\n'}
    marked = []
    for piece, is_trained in pieces:
        spaced = re.sub(r"[ \t\n]", lambda match: spaces[match[0]], visible(piece))
        marked.append(f'<span class="{"t" if is_trained else "k"}">{spaced}</span>')
    trained = " trained" if any(is_trained for _, is_trained in pieces) else ""
    return f'<div class="turn{trained}">{"".join(marked)}</div>'
