"""Draws how often `data.dedupe: near` leaves out a pair of rows, by the Jaccard index of their texts.

    python benchmarks/near_chances.py [--draws 400000]

Bytes of two signatures are equal with the index, and otherwise once in 256 times; bands and counts are of one draw.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from flatout.data.row_keys import EXACT_WORDS, INDEXED_WORDS, SIGNATURE_WORDS, are_near

INDICES = (0.60, 0.70, 0.75, 0.80, 0.85, 0.86, 0.87, 0.90, 0.95)
AT_ONCE = 1 << 14


def chance(prompts: float, answers: float, draws: int, seed: int = 0) -> float:
    """Return the share of drawn pairs that are found by a band and near, for these Jaccard indices of their texts."""
    draw, found = np.random.default_rng(seed), 0
    likely = np.repeat([prompts, answers], 4).astype(np.float32)
    for start in range(0, draws, AT_ONCE):
        size = min(AT_ONCE, draws - start), SIGNATURE_WORDS, 8
        differs = (draw.random(size, np.float32) >= likely) & (draw.integers(0, 256, size, np.uint8) != 0)
        keys = np.zeros((size[0], EXACT_WORDS + SIGNATURE_WORDS), np.uint64)
        keys[:, EXACT_WORDS:] = np.ascontiguousarray(differs.astype(np.uint8)).view(np.uint64)[..., 0]
        has_band = (~differs[:, :INDEXED_WORDS].any(2)).any(1)
        found += int(np.count_nonzero(has_band & are_near(keys, np.zeros_like(keys))))
    return found / draws


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=400_000)
    draws = parser.parse_args(arguments).draws
    print("| Jaccard index | of prompts and of answers | of one, the other being equal |\n|---|---|---|")
    for index in INDICES:
        print(f"| {index:.2f} | {chance(index, index, draws):.4%} | {chance(index, 1.0, draws):.4%} |", flush=True)


if __name__ == "__main__":
    main()
