"""A check at start-up that ranks which share a micro-batch compute the hidden states of whole documents."""

from __future__ import annotations

from dataclasses import replace

import torch

from flatout.models.blocks import hidden_states
from flatout.models.context.shard import MIN_CHUNK_TOKENS, ContextShard
from flatout.models.load.model import LoadedModel
from flatout.models.probe import evaluating, first_states, has_experts, random_batch, relative_error, widened

# states that have nothing in common differ by about 1.4
_16_BIT_LIMIT, _FLOAT8_LIMIT = 0.1, 0.2


def check_shard(loaded: LoadedModel, shard: ContextShard, *, fp8: bool = False) -> tuple[float, float]:
    """Return by how much a rank's shard of a micro-batch differs from the whole after the first layers, and a limit.

    The micro-batch has documents that are cut and some that are not. `fp8`: products are in float8, whose scales may
    depend on all tokens of a pass. Collective over the ranks that share it; the model's mode and the random state do
    not change.
    """
    model = loaded.model
    # float8 products need multiples of 16 tokens
    lengths = (3, 2 * shard.num_shards * MIN_CHUNK_TOKENS + 5, 150, 34)
    number = shard.num_boundaries(len(lengths)) if model.device.type == "cuda" else None
    batch = random_batch(model, lengths)
    on_host = batch.to(torch.device("cpu"))
    numbered = shard.of(replace(on_host, token_ids=torch.arange(batch.num_tokens)), number)
    real_rows = torch.nonzero(numbered.sample_counts).flatten().to(model.device)
    autocast = torch.autocast(model.device.type, dtype=loaded.dtype, enabled=loaded.autocast)
    with evaluating(model), torch.no_grad(), autocast, first_states(model) as states:
        hidden_states(model, batch)
        hidden_states(model, shard.of(on_host, number).to(model.device))
    plain = widened(states[0]).index_select(0, numbered.token_ids.to(model.device)[real_rows])
    ours = widened(states[1])[real_rows]
    # in fp64, rope's float32 cosines vary at lengths off the SIMD width
    limit = {torch.float64: 1e-6, torch.float32: 1e-4}.get(loaded.dtype, _16_BIT_LIMIT)
    return relative_error(ours, plain, has_experts(model), (len(real_rows),)), max(limit, _FLOAT8_LIMIT if fp8 else 0.0)
