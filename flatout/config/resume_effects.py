"""The effect of each changed setting on a run that resumes from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Effect = Literal["numerics", "rounding", "harmless"]

# the settings, by effect and reason. "numerics": resuming is refused unless checkpoint.allow_change names the setting.
# "rounding": the same steps, with sums in another order or by another kernel. "harmless": touches no weight. A missing
# key counts as "numerics".
_SETTINGS: Mapping[Effect, Mapping[str, str]] = {
    "numerics": {
        "order of samples and dropout": "seed",
        "precision=auto and the dropout streams depend on it": "device",
        "other parameters are trained": "method freeze",
        "other weights under the adapter, unless their files are the same": "model.name model.revision",
        "the weights under the adapter": "model.init",
        "rounds every step otherwise, by far more than the order of sums does": "model.precision",
        "other weights under the adapter": "base.storage",
        "rounds every step otherwise": "base.compute full.compute",
        "other weights are kept between steps": "full.weights",
        # content, tokenizer, template and mask are also compared by fingerprint; the settings fail earlier, by name
        "other rows": "data.sources",
        "other tokens": "data.tokenizer data.special_tokens",
        "other tokens and label masks": "data.template data.template_args",
        "other label masks": "data.empty_reasoning data.loss_type",
        "other samples": "data.max_tokens data.too_long data.on_bad_row data.num_samples data.shuffle data.seed",
        "another adapter": "lora.rank lora.targets lora.dora",
        "another scale of the adapter": "lora.alpha lora.rslora",
        "another dropout": "lora.dropout",
        "another start, which a run that goes on would pass over": "lora.continue_from",
        "other steps": "batch.samples_per_step",
        "another length: the learning rate of every step to come": "batch.epochs batch.max_steps",
        "another order of samples": "batch.shuffle",
        "another optimizer": "optim.name",
        "other updates": "optim.lr optim.beta1 optim.beta2 optim.eps optim.weight_decay optim.max_grad_norm",
        "the learning rate of every step to come": "schedule.kind schedule.warmup_steps schedule.warmup_ratio "
        "schedule.min_lr_ratio schedule.decay_ratio",
        "other samples are trained on": "eval.fraction",
        "the best loss so far would be compared with one over other rows": "eval.data",
        "rounds every sum of gradients otherwise": "comm.compress",
    },
    "rounding": {
        "any number of ranks takes the same steps; lora.dropout draws other masks": "gpus",
        "other kernels for the same formulas": "deterministic",
        "the same formulas in fused kernels": "compile",
        "the same kernels, launched together": "cuda_graphs",
        "the same steps, summed in other pieces": "memory",
        "the same activations, computed twice": "recompute",
        "the same sums over ranks, in another order": "strategy deepspeed sharding.replicas",
        "another kernel for the same formula": "model.attention",
        "the same updates, each as soon as its gradient is there": "full.update",
        "the same steps, summed in other pieces; lora.dropout draws other masks": "batch.micro_batch_tokens",
        "the same weights, gathered at other times": "sharding.reshard_after_forward sharding.prefetch",
        "the same updates, made on the host": "sharding.offload",
    },
    "harmless": {
        "a label": "name",
        "the folder may be moved": "run_dir data.root",
        "only how often figures are shown": "log_every_steps",
        "a label; the content is compared by its fingerprint": "data.name",
        "only how fast rows are tokenized": "data.num_procs",
        "when to measure; measuring changes no weight and no random stream": "eval.every_steps",
        "when to stop; no step computes otherwise": "eval.patience",
        "what counts as a new best; no step computes otherwise": "eval.min_delta",
        "when to save": "checkpoint.every_steps",
        "what to keep": "checkpoint.keep",
        "whether to resume": "checkpoint.resume",
        "when training goes on": "checkpoint.asynchronous",
        "what may change": "checkpoint.allow_change",
        "when to give up": "faults.max_restarts faults.hang_s faults.stall_s faults.long_phase_s faults.join_s",
        "any number of ranks takes the same steps": "faults.min_ranks",
    },
}
RESUME_EFFECTS: Mapping[str, tuple[Effect, str]] = {
    name: (effect, why)
    for effect, reasons in _SETTINGS.items()
    for why, names in reasons.items()
    for name in names.split()
}
