"""May this run go on from that checkpoint? Pure decisions over settings, data and steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flatout.errors import CheckpointError

Effect = Literal["maths", "rounding", "harmless"]

ABSENT = "(absent)"

# What a changed setting does to a run that goes on. "maths" refuses unless allowed; "rounding" gives the same steps
# with sums in another order or by another kernel; "harmless" touches no weight. A key that is not here is "maths".
EFFECTS: dict[str, tuple[Effect, str]] = {
    "name": ("harmless", "a label"),
    "run_dir": ("harmless", "the folder may be moved"),
    "seed": ("maths", "order of samples and dropout"),
    "device": ("maths", "precision=auto and the dropout streams depend on it"),
    "gpus": ("harmless", "any number of ranks takes the same steps"),
    "method": ("maths", "other parameters are trained"),
    "deterministic": ("rounding", "other kernels for the same formulas"),
    "freeze": ("maths", "other parameters are trained"),
    "compile": ("rounding", "the same formulas in fused kernels"),
    "cuda_graphs": ("rounding", "the same kernels, launched together"),
    "memory": ("rounding", "the same steps, summed in other pieces"),
    "recompute": ("rounding", "the same activations, computed twice"),
    "strategy": ("rounding", "the same sums over ranks, in another order"),
    "deepspeed": ("rounding", "the same sums over ranks, in another order"),
    "log_every_steps": ("harmless", "only how often figures are shown"),
    "model.name": ("maths", "the weights under the adapter; a moved folder needs checkpoint.allow_change"),
    "model.revision": ("maths", "the weights under the adapter"),
    "model.init": ("maths", "the weights under the adapter"),
    "model.precision": ("maths", "rounds every step otherwise, by far more than the order of sums does"),
    "model.attention": ("rounding", "another kernel for the same formula"),
    "base.storage": ("maths", "other weights under the adapter"),
    "base.compute": ("maths", "rounds every step otherwise"),
    "full.weights": ("maths", "other weights are kept between steps"),
    "full.compute": ("maths", "rounds every step otherwise"),
    "full.update": ("rounding", "the same updates, each as soon as its gradient is there"),
    # content, tokenizer, template and mask are compared by fingerprint as well; the settings tell sooner and by name
    "data.name": ("harmless", "a label; the content is compared by its fingerprint"),
    "data.root": ("harmless", "the folder may be moved"),
    "data.sources": ("maths", "other rows"),
    "data.tokenizer": ("maths", "other tokens"),
    "data.template": ("maths", "other tokens and label masks"),
    "data.loss_type": ("maths", "other label masks"),
    "data.max_tokens": ("maths", "other samples"),
    "data.too_long": ("maths", "other samples"),
    "data.on_bad_row": ("maths", "other samples"),
    "data.num_samples": ("maths", "other samples"),
    "data.shuffle": ("maths", "other samples"),
    "data.seed": ("maths", "other samples"),
    "data.num_procs": ("harmless", "only how fast rows are tokenised"),
    "lora.rank": ("maths", "another adapter"),
    "lora.alpha": ("maths", "another scale of the adapter"),
    "lora.dropout": ("maths", "another dropout"),
    "lora.targets": ("maths", "another adapter"),
    "lora.rslora": ("maths", "another scale of the adapter"),
    "lora.dora": ("maths", "another adapter"),
    "lora.continue_from": ("maths", "another start, which a run that goes on would pass over"),
    "batch.samples_per_step": ("maths", "other steps"),
    "batch.micro_batch_tokens": ("rounding", "the same steps, summed in other pieces"),
    "batch.epochs": ("maths", "another length: the learning rate of every step to come"),
    "batch.max_steps": ("maths", "another length: the learning rate of every step to come"),
    "batch.shuffle": ("maths", "another order of samples"),
    "optim.name": ("maths", "another optimizer"),
    "optim.lr": ("maths", "other updates"),
    "optim.beta1": ("maths", "other updates"),
    "optim.beta2": ("maths", "other updates"),
    "optim.eps": ("maths", "other updates"),
    "optim.weight_decay": ("maths", "other updates"),
    "optim.max_grad_norm": ("maths", "other updates"),
    "schedule.kind": ("maths", "the learning rate of every step to come"),
    "schedule.warmup_steps": ("maths", "the learning rate of every step to come"),
    "schedule.warmup_ratio": ("maths", "the learning rate of every step to come"),
    "schedule.min_lr_ratio": ("maths", "the learning rate of every step to come"),
    "schedule.decay_ratio": ("maths", "the learning rate of every step to come"),
    "eval.fraction": ("maths", "other samples are trained on"),
    "eval.data": ("maths", "the best loss so far would be compared with one over other rows"),
    "eval.every_steps": ("harmless", "when to measure; measuring changes no weight and no random stream"),
    "eval.patience": ("harmless", "when to stop; no step computes otherwise"),
    "eval.min_delta": ("harmless", "what counts as a new best; no step computes otherwise"),
    "checkpoint.every_steps": ("harmless", "when to save"),
    "checkpoint.keep": ("harmless", "what to keep"),
    "checkpoint.resume": ("harmless", "whether to resume"),
    "checkpoint.asynchronous": ("harmless", "when training goes on"),
    "checkpoint.allow_change": ("harmless", "what may change"),
    "sharding.reshard_after_forward": ("rounding", "the same weights, gathered at other times"),
    "sharding.prefetch": ("rounding", "the same weights, gathered at other times"),
    "sharding.offload": ("rounding", "the same updates, made on the host"),
    "sharding.replicas": ("rounding", "the same sums over ranks, in another order"),
    "comm.compress": ("maths", "rounds every sum of gradients otherwise"),
    "faults.max_restarts": ("harmless", "when to give up"),
    "faults.hang_s": ("harmless", "when to give up"),
    "faults.stall_s": ("harmless", "when to give up"),
    "faults.min_ranks": ("harmless", "any number of ranks takes the same steps"),
}


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that differs: its dotted key, both values (JSON) and what the difference does."""

    key: str
    saved: Any
    now: Any
    effect: Effect
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.saved)} in the checkpoint, {_shown(self.now)} now ({self.why})"


def config_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Settings that differ between a checkpoint's config and this run's, sorted by key.

    Both are nested dicts of JSON values (`Config.model_dump(mode="json")`); lists are compared whole. A key that only
    one of them has is a change from or to "(absent)".
    """
    before, after = dict(_leaves(saved)), dict(_leaves(now))
    changes = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if old != new:
            effect, why = _effect(key)
            changes.append(Change(key, old, new, effect, why))
    return changes


def refuse_changes(changes: Sequence[Change], allow: Sequence[str]) -> None:
    """Raise CheckpointError, naming each, for changes of the maths that `allow` does not name.

    An entry of `allow` is a key such as optim.lr or a section such as optim.
    """
    refused = [change for change in changes if change.effect == "maths" and not _allowed(change.key, allow)]
    if refused:
        _refuse("settings that change the maths differ from the checkpoint's", refused)


def refuse_other_data(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    allow: Sequence[str] = (),
    explained_by: Sequence[Change] = (),
) -> None:
    """Raise CheckpointError when the data or the plan is not the checkpoint's.

    `saved` and `now` map what was fingerprinted ("data", "eval_data", "plan") to JSON values, best objects with name,
    num_samples and fingerprint. A plan that differs is no error when a change in `explained_by` that is not harmless
    explains it: that one was refused or allowed by its own name. `allow` may name entries to let pass.
    """
    explained = any(change.effect != "harmless" for change in explained_by) or _allowed("data", allow)
    refused = [
        Change(key, saved.get(key, ABSENT), now.get(key, ABSENT), "maths", "other samples or another order of them")
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key) and not _allowed(key, allow) and not (key == "plan" and explained)
    ]
    if refused:
        _refuse("the data is not what the checkpoint was trained on", refused)


def is_complete(saved_step: int, num_steps: int) -> bool:
    """True when a run of `num_steps` has nothing left to do after `saved_step` completed steps.

    Ask this first: a run cut short to fewer steps than it has done is complete, not a refused change of max_steps.
    """
    return saved_step >= num_steps


def _refuse(what: str, refused: Sequence[Change]) -> None:
    lines = "".join(f"\n  - {change}" for change in refused)
    keys = ",".join(change.key for change in refused)
    raise CheckpointError(
        f"{what}; put {'it' if len(refused) == 1 else 'them'} back, choose another run_dir to start anew, or go on all "
        f"the same with checkpoint.allow_change=[{keys}]:{lines}"
    )


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        key = prefix + name
        # a dict under a key of the table is a value; every other dict is a section
        if isinstance(value, Mapping) and key not in EFFECTS:
            yield from _leaves(value, key + ".")
        else:
            yield key, value


def _effect(key: str) -> tuple[Effect, str]:
    return EFFECTS.get(key, ("maths", "a setting this flatout does not know"))


def _allowed(key: str, allow: Sequence[str]) -> bool:
    return any(key == entry or key.startswith(entry + ".") for entry in allow)


def _shown(value: Any) -> str:
    if value == ABSENT:
        return ABSENT
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    return value if isinstance(value, str) else json.dumps(value)
