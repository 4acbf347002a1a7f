"""Answer the run's prompts with its current weights, by the sampler that reads them where they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from flatout.models.blocks import TRANSFORMERS_ATTENTION
from flatout.models.model_with_loss import next_logits
from flatout.models.stops import stop_token_ids
from flatout.parallel.strategies.protocol import oom_as_resource_error
from flatout.planner.memory.sizes import MicroBatchSize
from flatout.rollout.in_process import InProcess
from flatout.rollout.sampler import NoRoomError, SamplingParams, pictures_of
from flatout.rollout.sampler_model import FLOAT8_TOLERANCE, TOLERANCES, SamplerModel
from flatout.track.record import Answer, AnswersRecord
from flatout.trainer.eval_prompts import EvalPrompts
from flatout.trainer.passes import autocast, inference, release_memory, sum_unless_stopped
from flatout.trainer.picture_inputs import recorded
from flatout.trainer.state import TrainingRun

OUT_OF_MEMORY = "out of memory; shorten eval.prompts or lower eval.max_new_tokens, or set eval.prompts=[]"


class StopRequested(Exception):  # noqa: N818  (a request, not an error)
    """A rank was asked to stop, which ranks agree on after their answers."""


def answer_prompts(run: TrainingRun) -> None:
    """Answer `eval.prompts` and record the answers; collective. Weights, gradients and random state do not change.

    Raises PassesStopped.
    """
    if (prompts := run.planned.prompts) is None:
        return
    started, step = time.perf_counter(), run.progress.step
    continued = generate(run, prompts)
    if continued is None:
        # called here because no frame of the failed pass holds tensors any more
        release_memory(run)
        run.reporter.event("answers_skipped", {"step": step, "why": OUT_OF_MEMORY})
        run.reporter.record(AnswersRecord(step, (), time.perf_counter() - started, OUT_OF_MEMORY))
        return
    decode = prompts.tokenizer.decode
    answers = tuple(
        Answer(
            prompt.text, str(decode(token_ids, skip_special_tokens=True)).strip(), prompt.reference,
            recorded(pictures_of(prompt.token_ids)),
        )
        for prompt, token_ids in zip(prompts.prompts, continued, strict=True)
    )  # fmt: skip
    run.reporter.record(AnswersRecord(step, answers, time.perf_counter() - started))


def generate(run: TrainingRun, prompt_set: EvalPrompts) -> list[tuple[int, ...]] | None:
    """Return the tokens that continue each prompt, up to `eval.max_new_tokens` or a stop token, which is left out.

    All ranks answer the same prompts. Where they share passes, as sharded weights are gathered in each, the first rank
    chooses every token, so that rounding cannot make ranks disagree about where an answer ends. All ranks return None
    if one has too little memory, and raise PassesStopped if one was asked to stop.
    """
    lockstep, most = run.planned.parallel_layout.lockstep_in_inference, run.config.eval.max_new_tokens
    if lockstep and not _fits_on_all_ranks(run, prompt_set):
        return None
    params = SamplingParams(
        most,
        temperature=run.config.eval.temperature,
        seed=run.config.seed + run.progress.step,
        stop_ids=frozenset(stop_token_ids(run.model, prompt_set.tokenizer, prompt_set.stop_tokens)),
        max_positions=prompt_set.max_positions,
    )
    counts = [0] * len(prompt_set.prompts)

    def report_token(prompt: int, completion: int, token_id: int) -> None:
        counts[prompt] += 1
        run.reporter.phase("answering prompts, token", max(counts), most)
        if run.stop.requested and not lockstep:
            raise StopRequested

    answers, has_failed = list[tuple[int, ...]](), torch.zeros((), device=run.device)
    shared = oom_as_resource_error(run.rank) if lockstep else nullcontext()
    try:
        with sampling(run) as sampler, shared:
            prompts = [prompt.token_ids for prompt in prompt_set.prompts]
            for (completion,) in sampler.sample(prompts, 1, params, report_token):
                answers.append(completion.answer_ids)
    except StopRequested:
        pass
    except (NoRoomError, torch.OutOfMemoryError):
        has_failed += 1
    return None if sum_unless_stopped(run, has_failed).item() else answers


@contextmanager
def sampling(run: TrainingRun) -> Iterator[InProcess]:
    """Yield `sampler_of` a run, ready for calls over the current weights; collective.

    Within, ranks may sample prompts of their own, unless `ParallelLayout.lockstep_in_inference`.
    """
    with inference(run), autocast(run):
        if not run.planned.parallel_layout.lockstep_in_inference:
            run.strategy.gather_weights()
        yield sampler_of(run)


def sampler_of(run: TrainingRun) -> InProcess:
    """Return the run's sampler, which is made once, and remembers between calls which backends are exact.

    On a GPU it keeps its slots and recorded steps from one round to the next; see `make_room_for_steps`.
    """
    if run.state.sampler is None:
        # passes over sharded state wait for streams of their own, which a recording must not
        records = not run.planned.parallel_layout.shards_state
        prompts, longest = run.planned.data.rollouts, 0
        if prompts is not None:
            longest = prompts.longest_answer(run.config.rollout.max_new_tokens, run.planned.shape.max_positions)
        # steps under autocast are recorded again in each call
        keeps = prompts is not None and run.device.type == "cuda" and not run.autocast
        run.state.sampler = InProcess(sampler_model_of(run), records=records, keeps_slots=keeps, slot_length=longest)
    return run.state.sampler


def make_room_for_steps(run: TrainingRun) -> None:
    """Free what sampling left, and the sampler's slots unless a step's planned temporaries fit beside them."""
    release_memory(run)
    largest, sampler = run.plan.largest_pass, run.state.sampler
    estimate = None if largest is None else run.planned.memory.estimate(largest[2].size)
    if sampler and estimate:
        kept_bytes = estimate.weights_bytes + estimate.adapter_bytes + estimate.optimizer_bytes
        if estimate.total_bytes - kept_bytes > torch.cuda.mem_get_info(run.device)[0]:
            sampler.release()


def sampler_model_of(run: TrainingRun) -> SamplerModel:
    """Return the run's current weights as a sampler reads them: as a training step computes, adapters unmerged."""
    layout, parallel_layout = run.plan.batch_layout, run.planned.parallel_layout
    attention = run.model.config.get_text_config()._attn_implementation

    def broadcast_tokens(tokens: Tensor) -> Tensor:
        return sum_unless_stopped(run, tokens if run.rank.is_first else torch.zeros_like(tokens))

    def all_reduce_min(number: int) -> int:
        numbers = torch.zeros(run.rank.world, dtype=torch.int64, device=run.device)
        numbers[run.rank.index] = number
        return int(run.strategy.sum_values(numbers).min())

    model = SamplerModel(
        pretrained=run.model,
        logits=lambda batch: run.loss_module(batch, lambda loss, batch: next_logits(loss.model, batch)),
        device=run.device,
        tolerance=FLOAT8_TOLERANCE if run.config.computes_in_fp8 else TOLERANCES[run.dtype],
        # every rank computes these passes whole
        max_pass_tokens=layout.micro_batch_tokens // parallel_layout.context_ranks,
        is_padded=layout.name == "rows",
        packed_context=None if attention in TRANSFORMERS_ATTENTION else nullcontext,
        log=lambda line: run.reporter.stage("answers", line),
        pictures=next((pictures for loader in run.loaders if (pictures := loader.pictures)), None),
    )
    if not parallel_layout.lockstep_in_inference:
        return model
    return replace(model, in_lockstep=True, broadcast_tokens=broadcast_tokens, all_reduce_min=all_reduce_min)


def _fits_on_all_ranks(run: TrainingRun, prompt_set: EvalPrompts) -> bool:
    """Allocate what the plan counts for the largest pass, free it, and return whether every rank could; collective.

    If a rank ran out of memory in a sharded pass, the others would wait for it.
    """
    num_prompts = len(prompt_set.prompts)
    most = sum(len(prompt.token_ids) + run.config.eval.max_new_tokens for prompt in prompt_set.prompts)
    size = MicroBatchSize(
        min(most, run.plan.batch_layout.micro_batch_tokens), num_label_tokens=num_prompts, num_documents=num_prompts
    )
    largest, state = run.memory.estimate(size), run.memory.estimate(MicroBatchSize(0, 0, 0))
    num_failed = torch.zeros((), device=run.device)
    try:
        if largest is not None and state is not None:
            torch.empty(largest.total_bytes - state.total_bytes, dtype=torch.uint8, device=run.device)
    except RuntimeError:  # the CPU's has no class of its own
        num_failed += 1
    return not run.strategy.sum_values(num_failed).item()
