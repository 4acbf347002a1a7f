"""Check the longest sample against the model's maximum position."""

from __future__ import annotations

from typing import Any

from flatout.errors import UsageError
from flatout.plan.shape import ModelShape


def check_positions(shape: ModelShape, longest_sample: int, *, origin: str) -> dict[str, Any]:
    """Return event facts about samples longer than a model's maximum position; empty if there are none.

    Rotary positions extend beyond it, but the model was not trained there. Raises UsageError if positions are a table.
    """
    limit = shape.max_positions
    if limit is None or longest_sample <= limit:
        return {}
    if shape.has_position_table:
        raise UsageError(
            f"{origin}: the model has {limit:,} positions, the longest sample {longest_sample:,} tokens; set "
            f"data.max_tokens: {limit} and build the data again"
        )
    what = "samples are longer than the model was trained for: lower data.max_tokens, or go on if that is meant"
    return {"longest_sample": longest_sample, "max_position_embeddings": limit, "what": what}
