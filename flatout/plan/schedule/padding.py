"""Tokens that a padding loader would compute for the same samples: the baseline for what packing saves."""

from __future__ import annotations

from collections.abc import Sequence


def naive_tokens(lengths: Sequence[int], num_ranks: int, micro_batch_tokens: int) -> int:
    """Count the tokens, with padding, of one step of a padding loader; `lengths` in the step's (random) order.

    Each rank takes an equal number (within one) of consecutive samples, splits them into batches that fit the same
    budget when padded, and pads each batch to its longest sample:

        sum over batches of  count * longest,   count * longest <= micro_batch_tokens
    """
    total = 0
    for rank in range(num_ranks):
        count = longest = 0
        for length in lengths[rank * len(lengths) // num_ranks : (rank + 1) * len(lengths) // num_ranks]:
            if count and (count + 1) * max(longest, length) > micro_batch_tokens:
                total += count * longest
                count = longest = 0
            count, longest = count + 1, max(longest, length)
        total += count * longest
    return total
