"""Scores rows by a model that scores: how often the chosen answer of a pair is ahead, or a text gets its label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flatout.data.classes import in_order_of
from flatout.data.token_store import TokenStore
from flatout.errors import DataError

# tokens that are computed together, with padding
_BATCH_TOKENS = 8192


@torch.no_grad()
def scores_of(
    model: Any, store: TokenStore, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> NDArray[np.float64]:
    """Return the scores (N, K) of a data set's samples, by transformers' own forward pass on padded batches.

    Without a padding token in the model's config, samples are computed one by one.
    """
    device, padding_id = model.get_input_embeddings().weight.device, model.config.get_text_config().pad_token_id
    scores = np.zeros((store.num_samples, model.config.num_labels))
    order, done = np.argsort(store.lengths, kind="stable")[::-1], 0
    while done < len(order):
        longest = int(store.lengths[order[done]])
        count = 1 if padding_id is None else max(1, _BATCH_TOKENS // longest)
        rows = order[done : done + count]
        ids = torch.full((len(rows), longest), padding_id or 0, device=device)
        mask = torch.zeros_like(ids)
        for place, index in enumerate(rows):
            token_ids = torch.tensor(store.sample(int(index)).token_ids.tolist(), device=device)
            ids[place, : len(token_ids)], mask[place, : len(token_ids)] = token_ids, 1
        scores[rows] = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.double().cpu().numpy()
        done += len(rows)
        on_progress(done, len(order))
    return scores


def judge(scores: NDArray[np.float64], store: TokenStore, labels: Sequence[str]) -> dict[str, Any]:
    """Return how well scores (N, K) agree with a data set: with its pairs for one score, else with its labels.

    Raises DataError for a data set of another kind, and for labels that the model does not know.
    """
    if len(labels) == 1:
        if not store.meta.counts.get("pairs"):
            raise DataError(f"{store.meta.sources[0]} has no pairs, which a model with one score is judged by")
        chosen, rejected = scores[::2, 0], scores[1::2, 0]
        right = int((chosen > rejected).sum())
        figures = {"margin": float((chosen - rejected).mean()), "mean_reward": float(scores.mean())}
        return {"num_pairs": len(chosen), "num_right": right, "accuracy": right / len(chosen), **figures}
    true = np.asarray(in_order_of(store, labels).extra["class"])
    predicted = scores.argmax(1)
    rows, known = list[dict[str, Any]](), list[float]()
    for number, label in enumerate(labels):
        is_said, is_there = predicted == number, true == number
        hits, said, there = int((is_said & is_there).sum()), int(is_said.sum()), int(is_there.sum())
        f1 = 2 * hits / ((said + there) or 1)
        known += [f1] if said or there else []
        shares = {"precision": hits / (said or 1), "recall": hits / (there or 1), "f1": f1}
        rows.append({"label": label, "num_samples": there, **shares})
    right, macro_f1 = int((predicted == true).sum()), sum(known) / len(known)
    figures = {"accuracy": right / len(true), "macro_f1": macro_f1}
    return {"num_samples": len(true), "num_right": right, **figures, "labels": rows}
