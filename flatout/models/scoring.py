"""Models that score texts: transformers' sequence classification, whose `score` reads each text's last token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from flatout.errors import UsageError
from flatout.models.load.auto_class import is_scoring
from flatout.models.lora.saved import SavedModule

SCORE = "score"
"""The name of the head in transformers' decoders for sequence classification."""
NEW_WEIGHT = f"{SCORE}.weight"
"""The weight that base models lack."""
ONE_SCORE = ("LABEL_0",)
"""transformers' name for the score of a model that has one."""
# tokens that are scored together, with padding
_BATCH_TOKENS = 8192


class Scoring(NamedTuple):
    """What a model's scores are called, and the token that pads batches: a text's last other token is read.

    With None, texts are not padded, and the last token is read.
    """

    labels: tuple[str, ...]
    padding_id: int | None


def use_scoring(config: Any, labels: Sequence[str] | None, origin: str) -> None:
    """Make transformers' configuration that of a model with one score for each of `labels` (None: the files', or one).

    Raises UsageError for a model type that transformers has no such class for, and for files with other scores.
    """
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise UsageError(
            f"{origin}: transformers has no sequence classification for model type {config.model_type}, so it cannot "
            "score; choose another model, such as a Llama or a Qwen3"
        )
    if is_scoring(config):
        known = [config.id2label[index] for index in range(config.num_labels)]
        labels = known if labels is None else labels
        check_labels(known, labels, origin, "train from the base model, or on the same labels")
    labels = ONE_SCORE if labels is None else labels
    config.architectures = [name]
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}


def check_labels(known: Sequence[str], labels: Sequence[str], origin: str, instead: str) -> None:
    """Raise UsageError unless the scores of files, which may have no names, are those of a run."""
    is_named = list(known) != [f"LABEL_{index}" for index in range(len(known))]
    if len(known) != len(labels) or (is_named and list(known) != list(labels)):
        raise UsageError(
            f"{origin}: its scores are {', '.join(known)[:200]}, but the run's {', '.join(labels)[:200]}; {instead}"
        )


def set_padding(model: PreTrainedModel, padding_id: int | None) -> None:
    """Have transformers read a text's last token that is not `padding_id`, also in padded batches.

    After the model is built: the gradient of an embedding's own padding row would be 0. None changes nothing.
    """
    for config in () if padding_id is None else (model.config, model.config.get_text_config()):
        config.pad_token_id = padding_id


def score_module(model: PreTrainedModel) -> nn.Module:
    """Return a model's `score`. Raises UsageError if it has another head, or one that is more than a product."""
    score = getattr(model, SCORE, None)
    plain = score.trained if isinstance(score, SavedModule) else score
    if not isinstance(plain, nn.Linear) or plain.bias is not None:
        raise UsageError(
            f"model type {model.config.model_type}: {type(model).__name__} has no linear `score` without a bias, which "
            "is the only head for scores that is supported; choose another model, such as a Llama or a Qwen3"
        )
    assert isinstance(score, nn.Module)
    return score


class ScoreHead:
    """Computes scores (S, K) of hidden states (S, D) in fp32 (fp64 in fp64), from the masters that are trained."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._score = score_module(model)

    def __call__(self, rows: Tensor) -> Tensor:
        score: Any = self._score
        weight: Any = score.trained.weight if isinstance(score, SavedModule) else score.weight
        with torch.autocast(rows.device.type, enabled=False):
            wide = torch.promote_types(rows.dtype, torch.float32)
            return F.linear(rows.to(wide), weight.to(wide))


@torch.no_grad()
def start_score(model: PreTrainedModel, seed: int) -> None:
    """Draw a new `score` as transformers does, but on the CPU and by `seed`, so that every device starts alike."""
    weight: Any = score_module(model).weight
    std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    weight.copy_(std * drawn)


def last_position(token_ids: NDArray[Any], padding_id: int | None) -> int:
    """Return the position of the token that transformers scores: the last that is not padding, 0 without one."""
    if padding_id is None:
        return len(token_ids) - 1
    return int(np.flatnonzero(token_ids != padding_id)[-1:].sum())


@torch.inference_mode()
def scores_of(
    model: Any,
    texts: Sequence[Sequence[int] | NDArray[Any]],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> NDArray[np.float64]:
    """Return the scores (N, K) of texts, given as token ids, by transformers' own forward pass on padded batches.

    Without a padding token in the model's config, texts are computed one by one.
    """
    device, padding_id = model.get_input_embeddings().weight.device, model.config.get_text_config().pad_token_id
    scores, lengths = np.zeros((len(texts), model.config.num_labels)), np.array([len(ids) for ids in texts], np.int64)
    order, done = np.argsort(lengths, kind="stable")[::-1], 0
    while done < len(order):
        longest = int(lengths[order[done]])
        count = 1 if padding_id is None else max(1, _BATCH_TOKENS // longest)
        rows = order[done : done + count]
        ids = torch.full((len(rows), longest), padding_id or 0, device=device)
        mask = torch.zeros_like(ids)
        for place, index in enumerate(rows):
            token_ids = torch.tensor(np.asarray(texts[index]).tolist(), device=device)
            ids[place, : len(token_ids)], mask[place, : len(token_ids)] = token_ids, 1
        scores[rows] = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.double().cpu().numpy()
        done += len(rows)
        on_progress(done, len(order))
    return scores
