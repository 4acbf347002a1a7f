"""Statistics of a token store, to look at before training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.data.token_store import TokenStore

_PERCENTILES = (5, 25, 50, 75, 95, 99, 100)
_BAR_WIDTH = 40
_LABELS = {
    "rows": "rows read",
    "bad": "bad rows skipped",
    "truncated": "truncated",
    "split": "split into windows",
    "too_long": "dropped: too long",
    "lost_labels": "dropped: no label left after cutting",
    "no_labels": "dropped: nothing to learn",
    "duplicates": "duplicates",
    "typed_control": "rows with control tokens as text",
    "empty_answers": "empty answers, without loss",
    "reasoning_dropped": "turns whose reasoning the template left out",
}


@dataclass(frozen=True, slots=True)
class Statistics:
    """`percentiles` of length in tokens; `histogram` (from, to, samples) by powers of two, `to` inclusive.

    `padding` maps a batch size to the share of padding in a batch when rows are batched in random order.
    """

    num_samples: int
    num_tokens: int
    num_labels: int
    percentiles: dict[int, int]
    histogram: tuple[tuple[int, int, int], ...]
    padding: dict[int, float]
    counts: dict[str, int]

    @property
    def label_share(self) -> float:
        """Label tokens / tokens."""
        return self.num_labels / self.num_tokens


def statistics(store: TokenStore) -> Statistics:
    """Return the statistics of a store with at least one sample."""
    lengths = store.lengths
    powers = np.ceil(np.log2(lengths)).astype(np.int64)
    return Statistics(
        num_samples=store.num_samples,
        num_tokens=int(lengths.sum()),
        num_labels=int(store.num_labels.sum()),
        percentiles={q: int(np.percentile(lengths, q, method="higher")) for q in _PERCENTILES},
        histogram=tuple(
            ((1 << p) // 2 + 1, 1 << p, int((powers == p).sum())) for p in range(powers.min(), powers.max() + 1)
        ),
        padding={size: padding_share(lengths, size) for size in (8, 32)},
        counts={name: store.meta.counts.get(name, 0) for name in _LABELS},
    )


def padding_share(lengths: NDArray[np.int64], batch_size: int) -> float:
    """Return padding / (tokens + padding) of batches in random order (fixed seed), padded to their longest row."""
    order = np.random.default_rng(0).permutation(len(lengths))
    starts = np.arange(0, len(lengths), batch_size)
    longest = np.maximum.reduceat(lengths[order], starts)
    sizes = np.diff(np.append(starts, len(lengths)))
    return 1.0 - float(lengths.sum()) / float((longest * sizes).sum())


def statistics_lines(found: Statistics) -> list[str]:
    """Return the statistics as lines of text."""
    spread = "  ".join(f"p{q} {tokens}" for q, tokens in found.percentiles.items())
    padding = ", ".join(f"{share:.1%} at batch {size}" for size, share in found.padding.items())
    lines = [
        f"samples {found.num_samples:,}  tokens {found.num_tokens:,}  "
        f"label tokens {found.num_labels:,} ({found.label_share:.1%})",
        f"length in tokens: {spread}",
        f"padding that a naive loader would pay: {padding}; here: none",
    ]
    most = max(count for _, _, count in found.histogram)
    for low, high, count in found.histogram:
        bar = "█" * round(_BAR_WIDTH * count / most)
        lines.append(f"{low:>7}-{high:<7} {count:>9,} {bar}")
    lines += [f"{label}: {found.counts[name]:,}" for name, label in _LABELS.items()]
    return lines
