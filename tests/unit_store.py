"""A data set of units of mixed sizes (pairs, singles, groups) with columns of its own, as a preference set would be."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.config.objective import ADVANTAGE, ANSWERS, POLICY_LOGPROB, REFERENCE_TOKENS, SAMPLER_LOGPROB
from flatout.data import registry
from flatout.data.add_column import add_column
from flatout.data.columns import Column
from flatout.data.store_writer import new_store
from flatout.data.token_store import StoreMeta, TokenStore
from flatout.data.tokenizer import load_tokenizer, tokenizer_digest

COLUMNS = {
    "weight": Column("float64", "token", "how much a token counts"),
    "ref_logprob": Column("float64", "sample", "log-probability of the answer by the reference"),
    "margin": Column("float64", "unit", "what the first answer is ahead by"),
}


def write_units(
    root: Path,
    tokenizer: Path,
    sizes: list[int],
    *,
    name: str = "units",
    declares: bool = True,
    lacks: str = "",
    unlabelled: int | None = None,
    seed: int = 0,
    labels: list[int] | None = None,
) -> TokenStore:
    """Write units of `sizes` samples as the data set `name`; about every second one shares a prompt of 70 tokens.

    The sample `unlabelled` has no label token. `labels` says which answers are to be learnt (1), as rows for KTO do.
    """
    rng, ids, masks, prefixes = np.random.default_rng(seed), [], [], []
    for unit, size in enumerate(sizes):
        shared = 70 if unit % 2 == 0 and size > 1 else 5
        prompt = rng.integers(5, 200, shared)
        for place in range(size):
            answer = np.concatenate([[200 + place], rng.integers(5, 200, rng.integers(6, 50))])
            ids.append(np.concatenate([prompt, answer]).astype(np.int32))
            masks.append((np.arange(len(ids[-1])) > shared) & (len(masks) != unlabelled))
        prefixes.append(shared if size > 1 else 0)
    columns = COLUMNS | ({"prefix_tokens": Column("int32", "unit", "tokens of the prompt")} if declares else {})
    columns |= {"label": Column("int8", "sample", "1: to be learnt")} if labels is not None else {}
    columns = {each: column for each, column in columns.items() if each != lacks}
    values = {
        "weight": rng.random(sum(map(len, ids))),
        "ref_logprob": -5 * rng.random(len(ids)),
        "margin": rng.random(len(sizes)),
        "prefix_tokens": np.array(prefixes, np.int32),
        "label": np.array(labels or [], np.int8),
    }
    folder, loaded, count = registry.built_dir(root, name), load_tokenizer(str(tokenizer)), len(ids)
    meta = StoreMeta(
        name=name, fingerprint="f" * 32, tokenizer=str(tokenizer), tokenizer_digest=tokenizer_digest(loaded),
        template="", template_text="", vocabulary_size=len(loaded),
        settings={"loss_type": "response_only", "max_tokens": 500},
        files=(name,), counts={"rows": count}, max_token_id=int(max(map(max, ids))),
    )  # fmt: skip
    units = np.array(sizes)
    with new_store(folder, len(loaded), columns=columns) as writer:
        writer.append(
            np.concatenate(ids), np.concatenate(masks), np.array([len(own) for own in ids]),
            np.zeros(count, np.int32), np.repeat(np.arange(1, len(sizes) + 1), units), units,
            {each: values[each] for each in columns},
        )  # fmt: skip
        percentiles = dict.fromkeys(("p50", "p90", "p95", "p99", "p100"), 100)
        writer.finish(meta, {"counts": {"rows": count}, "length_percentiles": percentiles})
    entry = registry.Entry(
        name=name, path=str(folder.relative_to(root)), sources=(name,), num_samples=count, tokenizer=str(tokenizer),
        template=None, loss_type="response_only", fingerprint=meta.fingerprint, created="",
    )  # fmt: skip
    registry.upsert(root, entry)
    return TokenStore.open(folder)


def write_groups(
    root: Path, model: Any, tokenizer: Path, sizes: list[int], *, name: str, lacks: Collection[str] = ()
) -> TokenStore:
    """Write groups of sampled answers: each token has an advantage, and log-probabilities near those of `model`."""
    store, rng = write_units(root, tokenizer, sizes, name=name), np.random.default_rng(1)
    logprobs, starts = np.zeros(len(store.token_ids)), store.offsets[:-1].tolist()
    with torch.no_grad():
        for index, start in enumerate(starts):
            ids = torch.tensor(store.sample(index).token_ids.tolist())
            rows = model(ids[None]).logits[0, :-1].log_softmax(-1)
            logprobs[start + 1 : start + len(ids)] = rows.gather(-1, ids[1:, None])[:, 0]
    own = np.repeat(rng.normal(0, 0.1, len(starts)), store.lengths)
    columns = {
        ADVANTAGE: rng.normal(0, 1, len(logprobs)),
        SAMPLER_LOGPROB: logprobs + rng.normal(0, 0.4, len(logprobs)),
        POLICY_LOGPROB: logprobs + own + rng.normal(0, 0.2, len(logprobs)),
        REFERENCE_TOKENS: logprobs + rng.normal(0, 0.3, len(logprobs)),
    }
    counts = 1 + rng.integers(0, 3, len(starts)) / 2
    for column, values in (columns | {ANSWERS: counts}).items():
        if column not in lacks:
            per = "sample" if column == ANSWERS else "token"
            add_column(store.folder, column, values.astype(np.float32), per=per, meaning="of rollouts")
    return TokenStore.open(store.folder)
