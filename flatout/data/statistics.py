"""Statistics of a token store, to look at before training."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from flatout.data.counts import COUNTS, LOSING
from flatout.data.pictures.show import picture_statistics
from flatout.data.preference_columns import unit_lines
from flatout.data.token_store import TokenStore
from flatout.errors import DataError
from flatout.io.json_file import read_json
from flatout.io.near_path import expand_home
from flatout.io.redact import printable

_PERCENTILES = (5, 25, 50, 75, 95, 99, 100)
_BAR_WIDTH, _WIDTH = 40, 80
_MAX_SOURCES, _MAX_READ = 20, 10_000


def statistics_lines(store: TokenStore) -> list[str]:
    """Return statistics of a store with at least one sample: sizes, lengths, what was lost, sources, and row outcomes.

    Lines have at most 80 columns, but one for a damaged report.json.
    """
    lengths, counts = store.lengths, store.meta.counts
    num_tokens, num_labels = int(lengths.sum()), int(store.num_label_tokens.sum())
    spread = dict(zip(_PERCENTILES, np.percentile(lengths, _PERCENTILES, method="higher").tolist(), strict=True))
    padding = ", ".join(f"{padding_share(lengths, size):.1%} at batch {size}" for size in (8, 32))
    lines = [
        f"samples {store.num_samples:,}  tokens {num_tokens:,}  "
        f"label tokens {num_labels:,} ({num_labels / num_tokens:.1%})",
        *_about_turns(store, num_tokens - num_labels, num_labels),
        *unit_lines(store),
        *picture_statistics(store),
        "length in tokens: " + "  ".join(f"p{percentile} {int(tokens)}" for percentile, tokens in spread.items()),
        *_lost(store),
        f"padding with naive batching: {padding}; with flatout: none",
    ]
    powers = np.ceil(np.log2(lengths)).astype(np.int64)
    numbers = np.bincount(powers)
    for power in range(powers.min(), powers.max() + 1):
        low, high, count = (1 << power) // 2 + 1, 1 << power, int(numbers[power])
        bar = "█" * round(_BAR_WIDTH * count / int(numbers.max()))
        lines.append(f"{low:>7}-{high:<7} {count:>9,} {bar}")
    fates = COUNTS.items() if counts else ()
    lines += [f"{how.label}: {counts.get(name, 0):,}" for name, how in fates if how.label]
    lines += _shares(store)
    wrapped = textwrap.TextWrapper(_WIDTH, subsequent_indent="  ")
    return [part for line in lines for part in (wrapped.wrap(line) if len(line) > _WIDTH else [line])]


def _about_turns(store: TokenStore, num_prompt: int, num_labels: int) -> Iterator[str]:
    """Tell prompts against answers and the turns in the loss, counted in at most 10,000 samples."""
    num = store.num_samples
    read = np.unique(np.linspace(0, num - 1, min(num, _MAX_READ)).astype(np.int64))
    turns = np.array(
        [np.count_nonzero(np.diff(np.asarray(store.sample(int(i)).loss_mask, np.int8)) == 1) for i in read]
    )
    of = f" (in {len(read):,} of the samples)" if len(read) < num else ""
    yield f"a sample: {num_prompt / num:,.1f} tokens without loss (prompts), {num_labels / num:,.1f} with (answers)"
    yield f"turns with loss: {turns.mean():.1f} a sample, at most {turns.max()}{of}"


def _lost(store: TokenStore) -> Iterator[str]:
    """Tell what the length policy lost, and the rows' lengths before it."""
    counts, limit = store.meta.counts, store.meta.settings.get("max_tokens")
    if counts and (path := store.folder / "report.json").exists():
        try:
            spread = read_json(path, DataError)["length_percentiles"]
            yield "rows before the cut: " + "  ".join(f"{part} {tokens}" for part, tokens in spread.items())
        except (DataError, LookupError, TypeError, AttributeError) as error:
            why = error if isinstance(error, DataError) else f"{path}: length_percentiles are missing"
            yield f"rows before the cut: not known, {why}; build the data set again"
    for what, total in (("tokens", "tokens"), ("labels", "label_tokens")):
        lost, read = sum(counts.get(f"{fate}_{what}", 0) for fate in LOSING), counts.get(total, 0)
        if read:
            name = total.replace("_", " ")
            yield f"lost to max_tokens={limit}: {lost:,} of {read:,} {name} ({lost / read:.1%})"


def _shares(store: TokenStore) -> Iterator[str]:
    """Tell each source's share, the largest first."""
    names = [_source_of(file, store.meta.sources) for file in store.meta.files]
    sources = list(dict.fromkeys(names))
    owner = np.array([sources.index(name) for name in names], np.int64)[store.files] if names else None
    if owner is None:
        return
    size = len(sources)
    samples = np.bincount(owner, minlength=size)
    tokens, labels = (np.bincount(owner, each, size) for each in (store.lengths, store.num_label_tokens))
    yield "share of each source:"
    for index in np.argsort(-tokens, kind="stable")[:_MAX_SOURCES].tolist():
        figures = f"  {tokens[index] / tokens.sum():>6.1%} of tokens  {labels[index] / max(labels.sum(), 1):>6.1%} of "
        figures += f"labels  {samples[index]:>9,} samples  "
        name, room = printable(sources[index]), _WIDTH - len(figures)
        yield figures + (name if len(name) <= room else "…" + name[1 - room :])
    if size > _MAX_SOURCES:
        yield f"  and {size - _MAX_SOURCES} more"


def _source_of(file: str, sources: Sequence[str]) -> str:
    """Return the source that a file belongs to, by its name; the file itself if none fits."""
    for source in sources:
        path = str(expand_home(source)) if source.startswith("~") else source
        inside = (path.rstrip("/") + "/", f"{path}[")
        if file == path or file.startswith(inside) or fnmatchcase(file, path):
            return source
    return file


def padding_share(lengths: NDArray[np.int64], batch_size: int) -> float:
    """Return padding / (tokens + padding) of batches in random order (fixed seed), padded to their longest row."""
    order = np.random.default_rng(0).permutation(len(lengths))
    starts = np.arange(0, len(lengths), batch_size)
    longest = np.maximum.reduceat(lengths[order], starts)
    sizes = np.diff(np.append(starts, len(lengths)))
    return 1.0 - float(lengths.sum()) / float((longest * sizes).sum())
