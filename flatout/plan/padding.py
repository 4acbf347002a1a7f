"""What a padding loader would compute for the same samples: the measure of what flattening saves."""

from __future__ import annotations

from collections.abc import Sequence


def naive_tokens(lengths: Sequence[int], num_ranks: int, micro_batch_tokens: int) -> int:
    """Tokens, padding included, of one step of a loader that pads; `lengths` in the step's (random) order.

    Each rank takes an equal run of consecutive samples (counts differ by one at most), cuts it into batches that fit
    the same budget once padded, and pads each batch to its longest sample:

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
