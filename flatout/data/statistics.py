"""Statistics of a token store, to look at before training."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flatout.data.token_store import TokenStore

_PERCENTILES = (5, 25, 50, 75, 95, 99, 100)
_BAR_WIDTH = 40
# counts of a store's meta, and how they are told
ROW_FATES = {
    "rows": "rows read",
    "bad": "bad rows skipped",
    "truncated": "truncated",
    "split": "split into windows",
    "too_long": "dropped: too long",
    "lost_labels": "dropped: no label left after truncation",
    "no_labels": "dropped: no label tokens",
    "duplicates": "duplicates",
    "typed_control": "rows with control tokens as text",
    "sorted_results": "rows whose results of calls were put in order",
    "doubled_markup": "rows with markup that the template writes too",
    "foreign_markup": "rows with another model's chat markup",
    "media_marks": "rows with <image> and the like as text",
    "empty_answers": "empty answers, not in the loss",
    "split_by_question": "conversations with a sample for each question (data.lost_reasoning)",
    "reasoning_masked": "answers without loss, as the template drops their reasoning",
    "reasoning_dropped": "turns whose reasoning the template dropped",
}


def statistics_lines(store: TokenStore) -> list[str]:
    """Return statistics of a store with at least one sample: sizes, lengths, a histogram, and row outcomes."""
    lengths = store.lengths
    num_tokens, num_labels = int(lengths.sum()), int(store.num_labels.sum())
    percentiles = np.percentile(lengths, _PERCENTILES, method="higher")
    spread = "  ".join(f"p{q} {int(tokens)}" for q, tokens in zip(_PERCENTILES, percentiles, strict=True))
    padding = ", ".join(f"{padding_share(lengths, size):.1%} at batch {size}" for size in (8, 32))
    lines = [
        f"samples {store.num_samples:,}  tokens {num_tokens:,}  "
        f"label tokens {num_labels:,} ({num_labels / num_tokens:.1%})",
        f"length in tokens: {spread}",
        f"padding with naive batching: {padding}; with flatout: none",
    ]
    powers = np.ceil(np.log2(lengths)).astype(np.int64)
    counts = np.bincount(powers)
    for power in range(powers.min(), powers.max() + 1):
        low, high, count = (1 << power) // 2 + 1, 1 << power, int(counts[power])
        bar = "█" * round(_BAR_WIDTH * count / int(counts.max()))
        lines.append(f"{low:>7}-{high:<7} {count:>9,} {bar}")
    lines += [f"{label}: {store.meta.counts.get(name, 0):,}" for name, label in ROW_FATES.items()]
    return lines


def padding_share(lengths: NDArray[np.int64], batch_size: int) -> float:
    """Return padding / (tokens + padding) of batches in random order (fixed seed), padded to their longest row."""
    order = np.random.default_rng(0).permutation(len(lengths))
    starts = np.arange(0, len(lengths), batch_size)
    longest = np.maximum.reduceat(lengths[order], starts)
    sizes = np.diff(np.append(starts, len(lengths)))
    return 1.0 - float(lengths.sum()) / float((longest * sizes).sum())
