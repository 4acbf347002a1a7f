"""Plants one known bug at a time in a copy of the package and shows that a test catches it.

    python tests/planted/bugs.py [NAME ...]

Most are bugs that shipped somewhere in this field, the others their next of kin. A bug that no test
catches makes the command fail.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXACT = "tests/parity/test_step_exact.py"
PACKED_EXACT = f"{EXACT}::test_packed_and_accumulated_equal_padded"
RUNS = "tests/unit/trainer/test_runs.py"
REPORTED = f"{RUNS}::test_what_is_reported_is_true"
SKIPPED = f"{RUNS}::test_a_step_that_fp16_skips_is_no_update"
RESUME = f"{RUNS}::test_resume_at_every_step_is_bit_equal"
COPY = "tests/unit/checkpoint/test_host_staging.py::test_every_update_waits_for_the_copy"
RANKS = "tests/distributed/test_gloo.py::test_ranks_equal_one_process[lora-2]"
CONTEXT = "tests/parity/test_context_attention.py::test_keys_are_gathered_and_their_gradients_return"
SELFTEST = "tests/parity/test_models_selftest.py"
ONE_ROUNDING = "tests/parity/test_one_rounding.py"
ROUTERS = "tests/parity/test_experts_router.py"
FALLBACK = "tests/unit/models/test_compile_fallback.py"
UNITS = "tests/property/test_unit_properties.py"
LOSSES = "tests/unit/trainer/test_losses.py::test_a_step_is_that_of_plain_torch_however_it_is_cut"
KTO = "tests/unit/trainer/test_kto.py"
POLICY = "tests/unit/trainer/test_policy.py"
REFERENCE = "tests/unit/trainer/test_reference.py"
LABELS = "tests/unit/trainer/test_classify.py"
SCORED = (
    "tests/unit/trainer/test_reward.py::test_reward_and_its_gradients_are_those_of_transformers_and_peft[full-packed]"
)
STEP_0 = f"{REFERENCE}::test_step_0_is_its_reference_to_the_bit[lora]"
ROUNDS = "tests/unit/trainer/test_rounds.py"
A_ROUND = f"{ROUNDS}::test_a_round_is_what_plain_transformers_and_numpy_say"
ROUND_STORE = "tests/unit/rollout/test_collect.py::test_the_store_of_a_round_has_what_is_trained"
COLUMNS = "tests/unit/trainer/test_batch_columns.py"
PREFERENCE = "tests/unit/data/test_pair_rows.py"
RENDERED = f"{PREFERENCE}::test_a_row_becomes_what_a_plain_rendering_gives"
UNTIED = (
    "(model.train(), setattr(model.get_output_embeddings(), 'weight', "
    "torch.nn.Parameter(model.get_output_embeddings().weight.detach().clone())))"
)


@dataclass(frozen=True)
class Bug:
    """In the function `place` the code `old` becomes `new`; `test` must then fail.

    `place` is a qualified name, such as `DDP.sum_gradients`, in whatever file it lies. `old` is an expression or a
    statement that occurs there once, whatever its layout; W, X, Y and Z in it stand for any expression, the same ones
    in `new`.
    """

    name: str
    place: str
    old: str
    new: str
    test: str


BUGS = (
    Bug("mean of means", "_backward_micro_batches", "X / normalizer",
        "X / max(1, batch.num_label_tokens) / len(micro_batches)", PACKED_EXACT),
    Bug("ranks averaged", "BucketedSum._launch", "dist.all_reduce(X, group=Y, async_op=True)",
        "dist.all_reduce(X.div_(2), group=Y, async_op=True)", RANKS),
    Bug("gradients not summed over ranks", "launch_step", "X.sum_gradients(Y)", "None", RANKS),
    Bug("gradients of keys from one piece alone", "_scatter", "X.index_add(0, rows, both)",
        "X.index_copy(0, rows, both)", CONTEXT),
    Bug("documents see each other", "document_arguments", "{'cu_seq_lens_q': X.cu_seqlens, 'max_length_q': Y}",
        "{'cu_seq_lens_q': X.cu_seqlens[[0, -1]], 'max_length_q': Y}", PACKED_EXACT),
    Bug("positions go on over documents", "flatten_samples", "np.arange(len(X)) - Y", "np.arange(len(X))",
        "tests/unit/models/test_packed_batch.py"),
    Bug("labels shifted by one", "flatten_samples", "torch.from_numpy(X - 1)", "torch.from_numpy(X)", PACKED_EXACT),
    Bug("a document predicts the next one", "flatten_samples", "loss_mask[X] = False", "pass",
        "tests/unit/models/test_packed_batch.py"),
    Bug("rate moves per micro-batch", "next_lr", "X.progress.num_updates", "X.progress.num_updates * 2", REPORTED),
    Bug("rate follows steps, not updates", "next_lr", "X.progress.num_updates", "X.progress.step", SKIPPED),
    Bug("a skipped step counted as an update", "finish_step", "X.skipped is None", "True", SKIPPED),
    Bug("optimizer not restored", "restore", "load_optimizer_state(X, Y, state, traits, Z)", "None", RESUME),
    Bug("dropout not tied to the position", "forward_pass",
        "seed_micro_batch(X, step=Y.index, rank=Z, micro_batch=W)",
        "seed_micro_batch(X, step=id(Y), rank=Z, micro_batch=W)", RESUME),
    Bug("noise not tied to the sample", "_noise",
        "hash_32(batch.position_ids)", "hash_32(torch.arange(len(documents)))",
        "tests/parity/test_step_exact.py::test_noise_on_embeddings_is_of_a_token_whatever_the_cut"),
    Bug("B learns at the rate of A", "set_lr", "lr * group.get(LR_RATIO, 1.0)", "lr",
        "tests/unit/optim/test_optim_flat.py::test_b_learns_at_a_multiple_of_the_rate"),
    Bug("labels smoothed in part", "TokenHead.regularized_cross_entropy", "logits.mean(-1)", "logits.amax(-1)",
        "tests/parity/test_head_tiled.py::test_label_smoothing_and_z_loss_equal_torch"),
    Bug("a unit is parted", "make_bundles", "index if item.unit is None else item.unit", "index",
        f"{UNITS}::test_steps_count_units_and_a_pass_parts_one_only_where_it_may"),
    Bug("a unit is held out in part", "split_held_out", "np.asarray(units, np.int64)", "rows",
        f"{UNITS}::test_a_unit_is_held_out_whole"),
    Bug("a label of the wrong sample", "BatchLoader._gather", "np.arange(len(read))", "np.arange(len(read))[::-1]",
        f"{COLUMNS}::test_each_label_has_the_columns_of_its_token_sample_and_unit"),
    Bug("a filler counts as a unit", "BatchLoader._gather", "micro_batch.is_filler", "False",
        f"{COLUMNS}::test_a_filler_has_no_sample_and_no_unit"),
    Bug("a column is replaced in its own file", "add_column", 'f"{name}-{mark[:16]}.npy"', 'f"{name}.npy"',
        "tests/unit/data/test_columns.py::test_a_column_is_whole_or_not_there_whenever_a_write_ends"),
    Bug("chosen and rejected exchanged", "parse_preference", "(row.named(CHOSEN), row.named(REJECTED))",
        "(row.named(REJECTED), row.named(CHOSEN))",
        f"{RENDERED}[texts]"),
    Bug("answers in common carry loss", "_conversations", "replace(message, train=False)", "message",
        f"{RENDERED}[an answer in common]"),
    Bug("a pair over the limit is cut", "SampleTokenizer._preference", "self._conversation(X, Y, is_whole=True)",
        "self._conversation(X, Y)",
        f"{PREFERENCE}::test_a_unit_over_the_limit_falls_out_whole"),
    Bug("one answer of a pair falls out", "_joined_units", "all(X)", "any(X)",
        f"{PREFERENCE}::test_a_unit_over_the_limit_falls_out_whole"),
    Bug("a prefix that predicts a label", "_prefix_tokens", "stops[:-1] |= X", "None", f"{RENDERED}[texts]"),
    Bug("copies part pairs", "TokenizedChunk.of_rows", "self.unit_sizes[units]", "None",
        f"{PREFERENCE}::test_copies_by_weight_and_the_held_out_side_keep_units_whole"),
    Bug("a margin of the wrong sign", "_margin", "X[0] - sum(X[1:])", "sum(X[1:]) - X[0]",
        f"{RENDERED}[UltraFeedback]"),
    Bug("rejected answers learnt", "make_normalizers", "_require_good_answers(X, Y)", "None",
        "tests/unit/trainer/test_preference_data.py::test_an_objective_refuses_data_of_another_kind"),
    Bug("the token before the last is scored", "last_position", "np.flatnonzero(X)[-1:]", "np.flatnonzero(X)[-2:-1]",
        f"{LABELS}::test_the_row_of_a_position_is_found_behind_shared_prefixes"),
    Bug("scores of a pair exchanged", "Reward.__call__", "chosen, rejected = scores[:, 0], scores[:, 1]",
        "chosen, rejected = scores[:, 1], scores[:, 0]", SCORED),
    Bug("a margin of a reward of the wrong sign", "Reward.__call__", 'ahead - pairs.column("margin").to(ahead.dtype)',
        'ahead + pairs.column("margin").to(ahead.dtype)', SCORED),
    Bug("a score of the files drawn anew", "load_pretrained", "is_scoring(config) and NEW_WEIGHT in missing_keys",
        "is_scoring(config)", f"{LABELS}::test_a_model_that_scores_does_not_write"),
    Bug("labels of evaluation in their own order", "in_order_of", "labels.index(label)", "own.index(label)",
        f"{LABELS}::test_evaluation_numbers_labels_as_training_does"),
    Bug("evaluation leaves dropout off", "inference", "module.training = True", "module.training = False",
        f"{EXACT}::test_evaluation_equals"),
    Bug("evaluation with dropout", "inference", "X.model.eval()", "None", f"{EXACT}::test_evaluation_equals"),
    Bug("rows repeated to fill the last step", "TrainingPlan._block", "np.arange(X, min(Y, Z))", "np.arange(X, Y) % Z",
        "tests/property/test_plan_properties.py"),
    Bug("merge without the scale", "LoraLinear._sum", "self.scaling * X", "X", "tests/parity/test_export_models.py"),
    Bug("head untied", "load/model.py:load_model", "model.train()", UNTIED,
        f"{EXACT}::test_tied_embedding_gets_the_gradient_of_both_uses"),
    Bug("non-finite loss trained on", "require_finite", "math.isfinite(X) and math.isfinite(Y)", "True",
        f"{RUNS}::test_a_non_finite_loss_stops_before_the_update"),
    Bug("end of turn not trained", "Masker.mask", "MaskedText(text, X, typed, Y, Z)",
        "MaskedText(text, tuple((a, b - 1) for a, b in X), typed, Y, Z)", "tests/unit/data/test_mask_rules.py"),
    Bug("clipping left out", "_update", "X.max_grad_norm / Y", "1e30 / Y", f"{EXACT}::test_grad_norm"),
    Bug("norms decayed", "split_by_decay", "X in Y or Z", "False", "tests/unit/optim/test_optim_build.py"),
    Bug("gradients of a failed pass kept", "make_room", "X.zero_grad(set_to_none=True)", "None",
        "tests/unit/trainer/test_out_of_memory.py::test_only_the_gradients_of_the_pass_that_fits_remain"),
    Bug("fused gradient without the scale", "_FusedLora.backward", "X * ctx.scaling", "X",
        "tests/parity/test_fused_lora.py"),
    Bug("training reads an old adapter", "_backward_micro_batches", "X.fused_lora.refresh()", "None",
        f"{RUNS}::test_a_resumed_run_reads_the_restored_adapter"),
    Bug("evaluation reads an old adapter", "inference", "X.fused_lora.refresh()", "None",
        f"{EXACT}::test_evaluation_equals"),
    Bug("update beside the copy", "_update", "X.saver.before_update()", "None", COPY),
    Bug("update in backward beside the copy", "_update_in_backward", "X.saver.before_update()", "None", COPY),
    Bug("a finished first rank taken for a dead one", "Heartbeats._take",
        'peer.has_left = peer.has_left or "bye" in message', "pass", "tests/unit/parallel/test_heartbeat.py"),
    Bug("layers compiled again in mid-run", "_compiler_settings", '{f"triton.{X}": True}', '{f"triton.{X}": False}',
        f"{FALLBACK}::test_the_kernel_of_norms_gradients"),
    Bug("compiler at work while weights are read", "import_compiler.import_it", "maybe_warm_pool()",
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(8))", f"{FALLBACK}::test_what_is_imported_early"),
    Bug("window ignored beside sinks", "plain_attention", "_causal_mask(X, Y, window)",
        "_causal_mask(X, Y, None if 'sinks' in settings else window)",
        "tests/parity/test_attention_forms.py::test_a_window_counts_beside_sinks"),
    Bug("logit scale dropped from a head with an adapter", "TokenHead._module_losses.tile_losses",
        "self.logits(X, Y)", "self.logits(X, Y) / self._scale",
        "tests/parity/test_head_tiled.py::test_logit_scale_and_softcap"),
    Bug("DoRA scales the bias", "LoraLinear.forward", "frozen + (ratio - 1) * X",
        "frozen + (ratio - 1) * (X + (0 if bias is None else bias))",
        "tests/parity/test_lora_peft.py::test_dora_of_layers_with_a_bias"),
    Bug("logit scale dropped from logits", "TokenHead.logits", "scaled_logits(X, *self._shape(Y))",
        "scaled_logits(X, 1.0, self._shape(Y)[1])", f"{SELFTEST}::test_understands_the_heads_of_the_table"),
    Bug("an unknown cap of the logits passed", "_check_head", "X <= limit", "True",
        f"{SELFTEST}::test_refuses_a_head_it_does_not_understand"),
    Bug("temperature multiplied", "at_temperature", "X / temperature", "X * temperature",
        "tests/unit/trainer/test_answers.py::test_a_low_temperature_draws_the_likeliest_tokens"),
    Bug("padding of rows counted in the load", "flatten_samples", "np.where(is_padding, 0, X)", "X",
        f"{ROUTERS}::test_padding_of_rows_counts_for_nothing"),
    Bug("gaps between documents counted in the load", "PackedBatch.spread",
        "blank.index_copy(0, rows, self.sample_counts)", "torch.ones_like(blank)",
        "tests/parity/test_hybrids.py::test_routers_of_packed_hybrids"),
    Bug("temperature before the soft-cap", "TokenHead._shape", "self._softcap / X", "self._softcap",
        "tests/parity/test_head_tiled.py::test_log_probabilities_and_entropy_at_a_temperature"),
    Bug("a maximum added up over ranks", "scatter_maxima", "rows[rank.index] = maxima", "rows[0] = maxima",
        "tests/unit/trainer/test_objective.py::test_a_maximum_is_that_of_all_micro_batches_ranks_and_sets"),
    Bug("log-probabilities of the token before", "TokenStore.label_places", "np.flatnonzero(X) + 1",
        "np.flatnonzero(X)", "tests/unit/trainer/test_token_columns.py::test_a_column_is_that_of_the_plain_model"),
    Bug("the reference of the policy", "reference_weights", "_set_weights(run, kept)", "None",
        "tests/unit/trainer/test_token_columns.py::test_a_column_is_that_of_the_plain_model"),
    Bug("losses by row share one gradient", "_TiledLoss.backward", "loss_grad[:, None]", "loss_grad.mean()",
        "tests/parity/test_head_tiled.py::test_losses_by_row_have_gradients_of_their_own"),
    Bug("a loss per unit divided by samples", "_values_of",
        "starts_unit.astype(np.float64)", "np.ones(store.num_samples)",
        "tests/unit/trainer/test_dpo.py::test_a_step_is_that_of_plain_transformers"),
    Bug("balance by each rank's own shares", "Routers._set_shares", "self._step.sum_values(X)", "X",
        f"{ROUTERS}::test_ranks_balance_by_the_loads_of_all"),
    Bug("what no gradient reaches decays", "freeze_named", "X.requires_grad_(False)", "None",
        "tests/unit/trainer/test_weight_decay.py::test_what_no_gradient_reaches"),
    Bug("two roundings", "LoraProduct.forward", "operands.multiply_with_lora(low, b, use_kernel=False)",
        "[operands.multiply(x) + F.linear(low, b)]", ONE_ROUNDING),
    Bug("a pair the wrong way round", "Preference.__call__", 'self._of_pairs("losses", chosen, rejected)',
        'self._of_pairs("losses", rejected, chosen)', f"{LOSSES}[simpo-packed, shared]"),
    Bug("beta on one side", "CPO.losses", "self.beta * (X - Y)", "self.beta * X - Y", f"{LOSSES}[cpo-packed, shared]"),
    Bug("the mean of a micro-batch", "Preference.__call__", "losses.sum()", "losses.mean()",
        f"{LOSSES}[dpo, smoothed-packed]"),
    Bug("lengths that count prompts", "Preference.__call__", "tokens.sample_lengths", "(tokens.sample_lengths + 5)",
        f"{LOSSES}[ipo-packed, shared]"),
    Bug("a margin with the wrong sign", "SimPO.losses", "X - self.gamma", "X + self.gamma",
        f"{LOSSES}[simpo-packed, shared]"),
    Bug("robust without its normalizer", "DPO.losses", "(right - wrong) / X", "right - wrong",
        f"{LOSSES}[dpo, robust-rows]"),
    Bug("the loss of SFT forgotten", "Preference.__call__", "losses + self.sft_weight * nll", "losses",
        f"{LOSSES}[simpo and SFT-rows]"),
    Bug("sums of the neighbouring sample", "LabelTokens.by_sample",
        "torch.segment_reduce(values, 'sum', lengths=X, unsafe=True, initial=0)",
        "torch.segment_reduce(values, 'sum', lengths=self.sample_lengths, unsafe=True, initial=0).roll(1)",
        f"{LOSSES}[dpo_norm-packed]"),
    Bug("the reference of the wrong sample", "_fill_reference", "computed[is_unknown]", "computed[is_unknown][::-1]",
        STEP_0),
    Bug("the reference of the trained model", "build_run", "compute_reference(run, compares=X)",
        "(restore(run, saved) if saved is not None else None, compute_reference(run, compares=False))",
        f"{REFERENCE}::test_a_resumed_run_has_the_reference_of_step_0"),
    Bug("a key without the weights", "reference_key", "fingerprint_model(X)", "None",
        f"{REFERENCE}::test_a_second_run_pays_nothing_unless_what_decides_it_differs"),
    Bug("a key without the tokens", "reference_key", "store.columns[name].fingerprint", "name",
        f"{REFERENCE}::test_a_second_run_pays_nothing_unless_what_decides_it_differs"),
    Bug("a key without the precision", "reference_key", "str(run.dtype)", "None",
        f"{REFERENCE}::test_a_second_run_pays_nothing_unless_what_decides_it_differs"),
    Bug("a key without the adapter", "reference_identity", "adapter is None", "True",
        f"{REFERENCE}::test_a_second_run_pays_nothing_unless_what_decides_it_differs"),
    Bug("the model keeps the reference's adapter", "weights_of", "_set_weights(run, trained)", "None",
        f"{REFERENCE}::test_another_adapter_can_be_the_reference"),
    Bug("what a killed pass knew is lost", "add_kept", "np.copyto(values, stored, where=X)", "None",
        f"{REFERENCE}::test_a_killed_pass_goes_on_to_the_bit"),
    Bug("z of the micro-batch", "KTO.__call__", 'X.estimates["kl"]', "ratios.detach().mean()", f"{LOSSES}[kto-packed]"),
    Bug("z with a gradient", "KTO.__call__", 'X.estimates["kl"]',
        'X.estimates["kl"] + ratios.mean() - ratios.detach().mean()', f"{LOSSES}[kto-rows]"),
    Bug("z of each rank alone", "_mean_estimates", "run.strategy.sum_values(X)", "(X * run.rank.world)",
        "tests/unit/trainer/test_losses.py::test_ranks_take_that_step_too[some]"),
    Bug("z below 0", "KTO.__call__", "X.clamp(min=0)", "X", f"{LOSSES}[kto, weighted-packed]"),
    Bug("labels the wrong way round", "KTO.__call__", 'X.column("label").bool()', '~X.column("label").bool()',
        f"{LOSSES}[kto-packed]"),
    Bug("a weight on one side", "KTO.__call__", "X.where(~desirable, self.desirable_weight)",
        "X.where(~desirable, 1.0)", f"{LOSSES}[kto, weighted-rows]"),
    Bug("a prompt with its own answer", "_answers_of_others", "return answer_of", "return np.arange(len(marks))",
        f"{KTO}::test_each_prompt_gets_the_answer_to_another"),
    Bug("the reference of its own answer", "make_kl_store",
        "replace(column, fingerprint=xxh3_128_hexdigest(X))", "column",
        f"{KTO}::test_a_file_of_labels_trains_alike_on_any_number_of_ranks[all]"),
    Bug("the baseline of the batch", "make_advantages", "X if Y else sizes",
        "X", f"{POLICY}::test_rewards_become_advantages"),
    Bug("a biased standard deviation", "_over_std", "X.std(ddof=1)", "X.std()",
        f"{POLICY}::test_rewards_become_advantages"),
    Bug("the sum of others' rewards", "_over_others", "X / (len(rewards) - 1)", "X",
        f"{POLICY}::test_rewards_become_advantages"),
    Bug("rewards equal up to rounding", "make_advantages", "(own != own[:1]).any()", "bool(own.std())",
        f"{POLICY}::test_rewards_become_advantages"),
    Bug("sum for mean over an answer", "Policy.__call__", 'self.normalize_by == "answers"', "False",
        f"{LOSSES}[grpo-packed, shared]"),
    Bug("temperature forgotten", "Policy.__call__", "tokens.logprobs_at(self.temperature)", "tokens.logprobs",
        f"{LOSSES}[cispo-packed, shared]"),
    Bug("advantage shifted by one", "Policy.__call__", "tokens.column(ADVANTAGE)", "tokens.column(ADVANTAGE).roll(1)",
        f"{LOSSES}[rloo-packed, shared]"),
    Bug("columns of prompts", "BatchLoader._gather", "X.columns[name][1:][X.loss_mask[1:]]",
        "X.columns[name][:-1][X.loss_mask[1:]]", f"{LOSSES}[rloo-packed, shared]"),
    Bug("dropped groups not counted", "Policy.normalizer", '"labels" if X else ANSWERS', '"labels" if X else "samples"',
        f"{LOSSES}[dr_grpo-packed, shared]"),
    Bug("sides of the clip exchanged", "Policy._bounds", "1 - low, 1 + high", "1 - high, 1 + low",
        f"{LOSSES}[dapo-packed, shared]"),
    Bug("dual clip of good answers", "Policy._surrogates", "X.where(advantages < 0, losses)", "X",
        f"{LOSSES}[dapo, dual-packed, shared]"),
    Bug("a clipped weight with a gradient", "Policy._surrogates", "clipped.detach()", "clipped",
        f"{LOSSES}[cispo-packed, shared]"),
    Bug("KL in the other direction", "Policy._figures", "_k3(tokens.column(REFERENCE_TOKENS) - logprobs)",
        "_k3(logprobs - tokens.column(REFERENCE_TOKENS))", f"{POLICY}::test_k2_has_the_gradient_of_the_reverse_kl"),
    Bug("k3 as the loss", "Policy.__call__", "self.kl / 2 * (X - Y).square()", "self.kl * ((Y - X).expm1() - (Y - X))",
        f"{POLICY}::test_k2_has_the_gradient_of_the_reverse_kl"),
    Bug("a ratio to the wrong old", "Policy.__call__", "tokens.column(POLICY_LOGPROB)",
        "tokens.column(SAMPLER_LOGPROB)", f"{LOSSES}[grpo-packed, shared]"),
    Bug("a sequence's ratio by its sum", "Policy._ratios", "X / tokens.sample_lengths", "X",
        f"{LOSSES}[gspo-packed, shared]"),
    Bug("certainty loses digits", "_plain_terms", "others.log1p().where(X, Y)", "Y",
        "tests/parity/test_head_tiled.py::test_near_certainty"),
    Bug("each round draws the same numbers", "collect_round.work", "index * len(numbers) + at", "at",
        f"{ROUNDS}::test_a_round_without_a_signal_changes_nothing_and_is_counted"),
    Bug("draws by a rank's own numbers", "collect_round.work", "index * len(numbers) + at",
        "index * len(numbers) + mine.index(at)", f"{ROUNDS}::test_two_ranks_sample_and_learn_what_one_does"),
    Bug("answers of weights that learnt otherwise", "identity_of", "numerics_of(X)", "{}",
        f"{ROUNDS}::test_a_start_before_the_first_checkpoint_takes_its_own_answers_and_none_of_others"),
    Bug("rewards of another answer of the group", "round_answers.py:_score", "islice(rows, X)",
        "[*islice(rows, X)][::-1]", A_ROUND),
    Bug("totals of another answer of the group", "round_answers.py:_score", "islice(totals, X)",
        "[*islice(totals, X)][::-1]", A_ROUND),
    Bug("groups in the order in which they ended", "collect_round.write", "sorted(journal.groups().items())",
        "journal.groups().items()", f"{ROUNDS}::test_two_ranks_sample_and_learn_what_one_does"),
    Bug("end of an answer without a label", "write_round", "np.ones(sum(counts))",
        "np.concatenate([np.arange(count) < count - 1 for count in counts])", ROUND_STORE),
    Bug("prompts of a round carry loss", "write_round", "_after(prompt, np.ones(sum(counts)), counts)",
        "np.ones(sum(counts) + len(prompt) * len(counts))", ROUND_STORE),
    Bug("a round's dropped groups not counted", "write_round", "advantages.count", "1.0", ROUND_STORE),
    Bug("temperature forgotten in sampling", "round_answers.py:_sample", "rollout.temperature", "1.0", A_ROUND),
    Bug("temperature of a round forgotten in the loss", "Policy.for_run",
        "{'temperature': rollout.temperature, **X}", "{'temperature': 1.0, **X}", A_ROUND),
    Bug("two roundings of fused layers", "_block_in_turn", "out.addmm_(part, X)", "out.add_(part @ X)", ONE_ROUNDING),
)  # fmt: skip


def plant(bug: Bug, copy: Path) -> Path:
    """Change the one place in a copy of the package, in the file that is returned. Fails if it is not there once."""
    function, file = _function(bug.place, copy / "flatout")
    old, new = _parsed(bug.old), _parsed(bug.new)
    found = [(node, bound) for node in ast.walk(function) if _matches(old, node, bound := {})]
    assert len(found) == 1, f"{bug.name}: {bug.place} in {file} holds {len(found)} of {bug.old!r}"
    node, bound = found[0]
    lines = file.read_bytes().splitlines(keepends=True)
    start, end = _offset(lines, node.lineno, node.col_offset), _offset(lines, node.end_lineno, node.end_col_offset)
    text, code = b"".join(lines), ast.unparse(_Fill(bound).visit(new))
    code = f"({code})" if isinstance(node, ast.expr) else code
    file.write_bytes(text[:start] + code.encode() + text[end:])
    return file


def _function(place: str, package: Path) -> tuple[ast.AST, Path]:
    """Find `place`: a function's name, behind its class's and a dot, or behind the file's and a colon."""
    named_file, _, place = place.rpartition(":")
    *outer, name = place.split(".")
    found = [
        (node, file)
        for file in sorted(package.rglob(named_file or "*.py"))
        if f"def {name}(" in (text := file.read_text()) and all(one in text for one in outer)
        for found_place, node in _functions(ast.parse(text), "")
        if found_place == place
    ]
    assert len(found) == 1, f"{place} is in {[str(file) for _, file in found]}"
    return found[0]


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            if isinstance(child, ast.FunctionDef):
                yield prefix + child.name, child
            yield from _functions(child, f"{prefix}{child.name}.")


def _parsed(code: str) -> ast.AST:
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _matches(pattern: object, node: object, bound: dict[str, ast.AST]) -> bool:
    """Whether a syntax tree is the pattern's, and what its free names stand for."""
    if isinstance(pattern, ast.Name) and pattern.id in "WXYZ" and isinstance(node, ast.expr):
        known = bound.setdefault(pattern.id, node)
        return ast.dump(known) == ast.dump(node)
    if isinstance(pattern, list):
        pairs = isinstance(node, list) and len(pattern) == len(node)
        return pairs and all(_matches(old, new, bound) for old, new in zip(pattern, node, strict=True))
    if isinstance(pattern, ast.AST):
        fields = [field for field in pattern._fields if field not in ("ctx", "type_comment")]
        return type(pattern) is type(node) and all(
            _matches(getattr(pattern, field), getattr(node, field), bound) for field in fields
        )
    return pattern == node


class _Fill(ast.NodeTransformer):
    def __init__(self, bound: dict[str, ast.AST]) -> None:
        self._bound = bound

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._bound.get(node.id, node)


def _offset(lines: list[bytes], line: int, column: int) -> int:
    return sum(map(len, lines[: line - 1])) + column


def is_caught(bug: Bug) -> bool:
    """Run the bug's test against the copy; its exit code 1 means that tests ran and failed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("flatout", "tests", "benchmarks", "pyproject.toml"):
            source = ROOT / name
            ignore = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, copy / name, ignore=ignore) if source.is_dir() else shutil.copy(source, copy)
        plant(bug, copy)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        if bug.test.endswith("]"):
            command += [bug.test, "-m", "not gpu"]  # also if only the exhaustive suite has it
        else:
            test, _, wanted = bug.test.partition("::")
            command += [test, "-k", wanted] if wanted else [test]
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout[-3000:]
        return done.returncode == 1


def main() -> int:
    wanted = sys.argv[1:]
    bugs = [bug for bug in BUGS if not wanted or bug.name in wanted]
    num_caught = 0
    for bug in bugs:
        started = time.perf_counter()
        caught = is_caught(bug)
        num_caught += caught
        print(
            f"{'caught' if caught else 'MISSED':<7} {bug.name:<40} {time.perf_counter() - started:5.1f} s  {bug.test}"
        )
    print(f"planted bugs caught: {num_caught} of {len(bugs)}")
    return 0 if num_caught == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
