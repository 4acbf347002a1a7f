"""Answer the run's prompts with its current weights: with a cache on a CPU, else by the pass that trains them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from flatout.models.packed import PackedBatch, flatten_samples, padded_num_boundaries
from flatout.models.probe import MODEL_ERRORS
from flatout.models.selftest import own_attention
from flatout.models.stops import stop_token_ids
from flatout.parallel.strategies.protocol import oom_as_resource_error
from flatout.planner.memory.sizes import MicroBatchSize
from flatout.planner.steps.rows import row_length
from flatout.track.record import Answer, AnswersRecord
from flatout.trainer.passes import inference, sum_unless_stopped
from flatout.trainer.prompts import PromptSet
from flatout.trainer.state import Run
from flatout.trainer.step import autocast, release_memory

# relative difference of logits with a cache to those of training: both add the same terms in another order
CACHE_TOLERANCE = 1e-3
OUT_OF_MEMORY = "out of memory; shorten eval.prompts or lower eval.max_new_tokens, or set eval.prompts: []"


def answer_prompts(run: Run) -> None:
    """Answer `eval.prompts` and record the answers; collective. Weights, gradients and random state do not change.

    Raises PassesStopped.
    """
    if run.prompts is None:
        return
    started, step = time.perf_counter(), run.progress.step
    continued = generate(run, run.prompts)
    if continued is None:
        # called here because no frame of the failed pass holds tensors any more
        release_memory(run)
        run.reporter.event("answers_skipped", {"step": step, "why": OUT_OF_MEMORY})
        run.reporter.record(AnswersRecord(step, (), time.perf_counter() - started, OUT_OF_MEMORY))
        return
    decode = run.prompts.tokenizer.decode
    answers = tuple(
        Answer(prompt.text, str(decode(token_ids, skip_special_tokens=True)).strip(), prompt.reference)
        for prompt, token_ids in zip(run.prompts.prompts, continued, strict=True)
    )
    run.reporter.record(AnswersRecord(step, answers, time.perf_counter() - started))


def generate(run: Run, prompt_set: PromptSet) -> list[list[int]] | None:
    """Return the tokens that continue each prompt, up to `eval.max_new_tokens` or a stop token, which is left out.

    All ranks run the same passes over the same prompts, as sharded weights are gathered in each. The first rank
    chooses every token, so that rounding cannot make ranks disagree about where an answer ends. All ranks return None
    if one has too little memory, and raise PassesStopped if one was asked to stop.
    """
    if run.device.type == "cpu" and not run.plan.layout.lockstep:
        if (cached := _cached_answers(run, prompt_set)) is not None:
            return cached
        run.reporter.stage("answers", "every token computes its prompt again: this model has no cache that is exact")
    return _recomputed_answers(run, prompt_set)


def _recomputed_answers(run: Run, prompt_set: PromptSet) -> list[list[int]] | None:
    """Return what `generate` does, by passes over each prompt with all of its answer so far."""
    groups = list(_groups(run, prompt_set))
    if run.plan.layout.lockstep and not _fits_on_all_ranks(run, prompt_set, groups):
        return None
    stop_ids = set(stop_token_ids(run.model, prompt_set.tokenizer, prompt_set.stop_tokens))
    generator = torch.Generator().manual_seed(run.config.seed + run.progress.step)
    answers: list[list[int]] = [[] for _ in prompt_set.prompts]
    with inference(run):
        for open_ones in groups:
            for num_tokens in range(run.config.eval.max_new_tokens):
                run.reporter.phase("answering prompts, token", num_tokens + 1, run.config.eval.max_new_tokens)
                sequences = [[*prompt_set.prompts[index].token_ids, *answers[index]] for index in open_ones]
                chosen = _next_tokens(run, sequences, generator)
                if chosen is None:
                    return None
                for index, token_id in zip(tuple(open_ones), chosen, strict=True):
                    if token_id not in stop_ids:
                        answers[index].append(token_id)
                    length = len(prompt_set.prompts[index].token_ids) + len(answers[index])
                    if token_id in stop_ids or length == prompt_set.max_positions:
                        open_ones.remove(index)
                if not open_ones:
                    break
    return answers


def _cached_answers(run: Run, prompt_set: PromptSet) -> list[list[int]] | None:
    """Answer one prompt after another with transformers' own attention and cache: a CPU would take minutes without.

    All ranks return None if on one of them the model has no usable cache, or its logits at the end of the first answer
    are not those of the pass that trains it. Raises PassesStopped.
    """
    stop_ids = set(stop_token_ids(run.model, prompt_set.tokenizer, prompt_set.stop_tokens))
    generator = torch.Generator().manual_seed(run.config.seed + run.progress.step)
    answers: list[list[int]] = []
    is_exact = torch.ones((), device=run.device)
    with inference(run), suppress(*MODEL_ERRORS):
        for prompt in prompt_set.prompts:
            answer, seen, logits = _continue_cached(run, prompt_set, prompt.token_ids, stop_ids, generator)
            if run.stop.requested:
                break
            if not answers:
                with autocast(run):
                    true = run.loss(_batch_of([seen], run.device, run.plan.layout.name == "rows"), True)[0]
                error = (logits.to(true.dtype) - true).norm() / true.norm()
                is_exact *= error <= (CACHE_TOLERANCE if run.dtype.itemsize > 2 else 16 * CACHE_TOLERANCE)
            answers.append(answer)
    is_exact *= len(answers) == len(prompt_set.prompts)
    return answers if sum_unless_stopped(run, is_exact).item() == run.rank.world else None


def _continue_cached(
    run: Run, prompt_set: PromptSet, token_ids: Sequence[int], stop_ids: set[int], generator: torch.Generator
) -> tuple[list[int], list[int], Tensor]:
    """Return what continues a prompt, the tokens that the last pass had seen, and its logits after them, (1, V)."""
    most, heat = run.config.eval.max_new_tokens, run.config.eval.temperature
    room = most if prompt_set.max_positions is None else prompt_set.max_positions - len(token_ids)
    given, seen, answer, cache = list(token_ids), list[int](), list[int](), None
    logits = torch.empty(0)
    with autocast(run), own_attention(run.model):
        while len(answer) < min(most, room) and not run.stop.requested:
            run.reporter.phase("answering prompts, token", len(answer) + 1, most)
            output = run.model(input_ids=torch.tensor([given]), past_key_values=cache, use_cache=True)
            logits, cache, seen = output.logits[:, -1], output.get("past_key_values"), seen + given
            if cache is None:
                raise ValueError("the model keeps no cache of keys and values")
            token_id = int(_sampled(logits, heat, generator) if heat else logits.argmax(-1))
            if token_id in stop_ids:
                break
            answer.append(token_id)
            given = [token_id]
    return answer, seen, logits


def _groups(run: Run, prompt_set: PromptSet) -> Iterator[list[int]]:
    """Yield the prompts' indices in groups that fit a micro-batch with their answers; each has at least one."""
    group: list[int] = []
    # every rank computes these passes whole
    limit = run.plan.layout.micro_batch_tokens // run.planned.parallel_layout.context_ranks
    for index in range(len(prompt_set.prompts)):
        if group and _num_tokens(run, prompt_set, [*group, index]) > limit:
            yield group
            group = []
        group.append(index)
    yield group


def _num_tokens(run: Run, prompt_set: PromptSet, group: Sequence[int]) -> int:
    """Return the tokens of the longest pass over a group of prompts with their answers."""
    lengths = [len(prompt_set.prompts[index].token_ids) + run.config.eval.max_new_tokens for index in group]
    return sum(lengths) if run.plan.layout.pass_tokens is None else len(lengths) * row_length(max(lengths))


def _fits_on_all_ranks(run: Run, prompt_set: PromptSet, groups: Sequence[Sequence[int]]) -> bool:
    """Allocate what the plan counts for the largest pass, free it, and return whether every rank could; collective.

    If a rank ran out of memory in a sharded pass, the others would wait for it.
    """
    most = max(_num_tokens(run, prompt_set, group) for group in groups)
    # the estimate is for one rank's share
    most *= run.planned.parallel_layout.context_ranks
    size = MicroBatchSize(most, num_labels=max(map(len, groups)), num_documents=max(map(len, groups)))
    whole, state = run.memory.estimate(size), run.memory.estimate(MicroBatchSize(0, 0, 0))
    num_failed = torch.zeros((), device=run.device)
    try:
        if whole is not None and state is not None:
            torch.empty(whole.total_bytes - state.total_bytes, dtype=torch.uint8, device=run.device)
    except RuntimeError:  # the CPU's has no class of its own
        num_failed += 1
    return not run.strategy.sum_values(num_failed).item()


def _next_tokens(run: Run, sequences: Sequence[Sequence[int]], generator: torch.Generator) -> list[int] | None:
    """Return the first rank's choice of a token after each sequence; `generator` draws it on the CPU.

    All ranks return None if one runs out of memory, which raises ResourceError in a sharded pass.
    """
    # the last element counts the ranks that failed
    token_ids = torch.zeros(len(sequences) + 1, dtype=torch.int64, device=run.device)
    try:
        with autocast(run), oom_as_resource_error(run.rank) if run.plan.layout.lockstep else nullcontext():
            logits, likeliest = run.loss(_batch_of(sequences, run.device, run.plan.layout.name == "rows"), True)
        if run.rank.is_first:
            heat = run.config.eval.temperature
            token_ids[:-1] = _sampled(logits, heat, generator) if heat else likeliest
    except torch.OutOfMemoryError:
        token_ids[-1] = 1
    *chosen, num_failed = sum_unless_stopped(run, token_ids).tolist()
    return None if num_failed else chosen


def _batch_of(sequences: Sequence[Sequence[int]], device: torch.device, rows: bool) -> PackedBatch:
    """Return the sequences as one batch whose label rows are their last tokens, padded on a GPU as in training."""
    samples = [(np.asarray(sequence), np.zeros(len(sequence), bool)) for sequence in sequences]
    num_boundaries = padded_num_boundaries(len(samples)) if device.type == "cuda" else None
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    size = row_length(int(lengths.max())) if rows else None
    batch = flatten_samples(samples, num_boundaries=num_boundaries, row_length=size)
    last_rows = batch.cu_seqlens[: len(lengths)] + lengths - 1
    return replace(batch, label_rows=last_rows, label_ids=torch.zeros_like(last_rows)).to(device)


def _sampled(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Draw from softmax(logits / temperature) by the Gumbel-max trick, which needs no sum; (L, V) to (L,)."""
    noise = torch.empty(logits.shape, dtype=torch.float64).exponential_(generator=generator)
    return (logits.double().cpu() / temperature - noise.log()).argmax(-1)
