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
        "changes the order of samples and dropout": "seed",
        "precision=auto and dropout masks depend on it": "device",
        "trains different parameters": "method freeze model.freeze_vision_tower model.freeze_projector",
        "changes the base weights, unless the files are the same": "model.name model.revision",
        "changes the initial weights": "model.init",
        "changes rounding in every step, far more than the order of sums does": "model.precision",
        "changes the base weights": "base.storage",
        "changes rounding in every step": "base.compute base.backward full.compute full.hidden_states",
        "changes the precision of the trained weights": "full.weights",
        # content, tokenizer, template and mask are also compared by fingerprint; the settings fail earlier, by name
        "changes the rows": "data.sources data.media_root",
        "changes the tokens": "data.tokenizer data.special_tokens data.new_tokens data.new_special_tokens",
        "changes the tokens and loss masks": "data.template data.template_args data.end_of_turn",
        "changes the samples and loss masks": "data.lost_reasoning",
        "changes the loss masks": "data.empty_reasoning data.loss_type",
        "changes the samples": "data.max_tokens data.too_long data.on_bad_row data.num_samples data.shuffle data.seed "
        "data.dedupe",
        "changes the adapter": "lora.rank lora.rank_pattern lora.targets lora.layers lora.dora lora.modules_to_save "
        "lora.keep_tied",
        "changes the adapter's scale": "lora.alpha lora.alpha_pattern lora.rslora",
        "changes dropout": "lora.dropout",
        "a resumed run ignores the adapter to start from": "lora.continue_from",
        "changes the samples of every step": "batch.samples_per_step",
        "changes the length of the run, and so the learning rate of all later steps": "batch.epochs batch.max_steps",
        "changes the order of samples": "batch.shuffle",
        "changes the loss": "objective.kind objective.reference.adapter experts.balance_loss experts.z_loss",
        "changes the routing": "experts.bias_update",
        "changes the optimizer": "optim.name",
        "changes later updates": "optim.lr optim.beta1 optim.beta2 optim.eps optim.weight_decay optim.max_grad_norm",
        "changes the learning rate of all later steps": "schedule.kind schedule.warmup_steps schedule.warmup_ratio "
        "schedule.min_lr_ratio schedule.decay_ratio",
        "changes the samples to train on": "eval.fraction",
        "the best figure so far was measured on different rows": "eval.data",
        "the best so far was judged by another metric": "eval.best",
        "changes rounding in every sum of gradients": "comm.compress",
        "changes which steps update": "faults.spike faults.spike_sigmas",
    },
    "rounding": {
        "any number of ranks takes the same steps; lora.dropout masks change": "gpus context.parallel",
        "different kernels for the same formulas": "deterministic",
        "the same formulas in fused kernels": "compile",
        "the same kernels, launched together": "cuda_graphs",
        "the same steps in different micro-batches": "memory",
        "the same activations, recomputed": "recompute",
        "the same sums over ranks in a different order": "strategy deepspeed sharding.replicas experts.parallel",
        "a different kernel for the same formula": "model.attention model.experts",
        "the same updates, each as soon as its gradient is ready": "full.update",
        "the same steps in different micro-batches; lora.dropout masks change": "batch.micro_batch_tokens",
        "the same steps, packed or padded; lora.dropout masks change": "batch.layout",
        "the same steps, shared prefixes computed once or for each sample": "batch.share_prefix",
        "the same weights, gathered at different times": "sharding.reshard_after_forward sharding.prefetch",
        "the same updates, computed on the host": "sharding.offload",
    },
    "harmless": {
        "a label": "name",
        "folders may move": "run_dir data.root",
        "sets only how often metrics are logged": "log_every_steps",
        "a label; the fingerprint identifies the content": "data.name objective.path",
        "sets only how fast rows are tokenized": "data.num_procs",
        "sets when to evaluate, which changes no weight and no random state": "eval.every_steps",
        "sets when to stop, and changes no step": "eval.patience",
        "sets what counts as a new best, and changes no step": "eval.min_delta",
        "sets what is answered, which changes no weight and no random state": "eval.prompts eval.max_new_tokens "
        "eval.temperature",
        "sets what is recorded": "eval.worst_samples",
        "sets when to save": "checkpoint.every_steps",
        "sets which checkpoints to keep": "checkpoint.keep",
        "sets whether to resume": "checkpoint.resume",
        "sets whether training waits for a save": "checkpoint.asynchronous",
        "sets which settings may change": "checkpoint.allow_change",
        "sets when to give up": "faults.max_restarts faults.hang_s faults.stall_s faults.long_phase_s faults.join_s",
        "any number of ranks takes the same steps": "faults.min_ranks",
        "sets where figures are sent": "track.to track.project track.tags track.upload_final",
    },
}
RESUME_EFFECTS: Mapping[str, tuple[Effect, str]] = {
    name: (effect, why)
    for effect, reasons in _SETTINGS.items()
    for why, names in reasons.items()
    for name in names.split()
}
