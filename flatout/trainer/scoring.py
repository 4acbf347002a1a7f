"""Runs that train scores: what their model's `score` is made for, and which settings they cannot have."""

from __future__ import annotations

import numpy as np

from flatout.config.schema import Config
from flatout.data.classes import alike_labels, in_order_of
from flatout.data.rows.formats.answers import CLASS
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import tokenizer_of
from flatout.errors import DataError, Fix, UsageError
from flatout.models.load.inference import saved_scoring
from flatout.models.scoring import ONE_SCORE, SCORE, Scoring, check_labels
from flatout.objectives.protocol import Objective
from flatout.track.callback import Reporter


def check_scoring(config: Config, objective: Objective) -> None:
    """Raise UsageError for settings that a run cannot have whose objective reads scores."""
    if objective.reads != "scores":
        return
    if config.eval.prompts:
        raise UsageError(
            f"eval.prompts: objective {objective.name} trains a model that scores texts and does not write, so it "
            "answers no prompt; remove them"
        )
    if config.method == "lora" and not config.lora.saves(SCORE):
        raise UsageError(
            f"objective {objective.name} trains a new `score`, which lora.modules_to_save lacks",
            [Fix({"lora.modules_to_save": [*config.lora.modules_to_save, SCORE]}, "as PEFT does")],
        )
    shared = {
        "context.parallel": (config.context.parallel, "scores the last token of a text, of which a rank has a shard"),
        "experts.parallel": (config.experts.parallel, "is not proved with shared experts"),
    }
    for setting, (num_ranks, why) in shared.items():
        if num_ranks > 1:
            raise UsageError(f"{setting}: {num_ranks}: objective {objective.name} {why}", [Fix({setting: 1})])


def scoring_of(config: Config, objective: Objective, store: TokenStore) -> Scoring | None:
    """Return what the run's model scores; None for a model that writes.

    Batches are padded by the tokenizer's own padding token, or if it has none by its end token. Raises DataError for a
    tokenizer that has neither, and UsageError if `lora.continue_from` scores others.
    """
    if objective.reads != "scores":
        return None
    tokenizer = tokenizer_of(config.data, config.model.name)
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_token_id is None:
        raise DataError(
            f"tokenizer {config.data.tokenizer or config.model.name!r} has no pad_token and no eos_token, so "
            "batches of texts could not be padded; set one in tokenizer_config.json"
        )
    labels, adapter = store.meta.labels or ONE_SCORE, config.lora.continue_from
    if adapter is not None and (saved := saved_scoring(adapter)) is not None:
        instead = "remove lora.continue_from, or train on the same labels"
        check_labels(saved.labels, labels, f"lora.continue_from: {adapter}", instead)
    return Scoring(labels, int(pad_token_id))


def with_used_labels(store: TokenStore, objective: Objective, reporter: Reporter) -> TokenStore:
    """Number the labels that samples have, and tell the others, whose rows were left out.

    Raises DataError unless samples have two.
    """
    labels = store.meta.labels
    if not labels or objective.reads != "scores":
        return store
    counts = np.bincount(np.asarray(store.extra[CLASS]), minlength=len(labels))
    used = [label for label, count in zip(labels, counts, strict=True) if count]
    unused = [label for label in labels if label not in used]
    note = f"; no sample has {', '.join(map(repr, unused))[:200]}, whose rows were left out" if unused else ""
    if len(used) < 2:
        raise DataError(f"{store.folder}: every row has the label {used[0]!r:.60}: there is nothing to classify{note}")
    if alike := alike_labels(used):
        reporter.event("labels", {"notes": alike})
    if note:
        reporter.stage("labels", f"{len(used)} of {len(labels)} are trained{note}")
    return in_order_of(store, used)
