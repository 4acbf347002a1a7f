"""Run folders with curves that look real, written by the writer of real runs, for tests and benchmarks of readers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from flatout.track.record import (
    Answer,
    AnswersRecord,
    EvalFigures,
    EvalRecord,
    GpuFacts,
    PlanFacts,
    RunEnd,
    RunStart,
    StepRecord,
)
from flatout.track.run_folder import RunFolderWriter

STARTED_AT = 1_790_000_000.0
GIB = 2**30
SETTINGS = {
    "name": "qwen3-8b-chats", "run_dir": "runs/qwen3-8b-chats", "seed": 42, "method": "lora", "strategy": "auto",
    "log_every_steps": 1, "model.name": "Qwen/Qwen3-8B", "data.name": "chats", "data.max_tokens": 4096,
    "lora.rank": 32, "lora.alpha": 32.0, "batch.samples_per_step": 64, "optim.lr": 2e-4, "schedule.kind": "cosine",
    "base.storage": "fp8", "eval.fraction": 0.02, "eval.every_steps": 500, "checkpoint.every_steps": 500,
}  # fmt: skip
PROMPTS = (
    ("What is the boiling point of water at sea level?", "100 degrees Celsius, which is 212 degrees Fahrenheit."),
    ("Write a haiku about a compiler.", None),
)
ANSWERS = (
    "water water the the point of of boiling",
    "The boiling point is 90 degrees.",
    "Water boils at 100 degrees at sea level.",
    "At sea level, water boils at 100 degrees Celsius (212 degrees Fahrenheit).",
)


def plan_facts(num_steps: int, num_ranks: int, rng: np.random.Generator) -> PlanFacts:
    def lengths(count: int) -> tuple[int, ...]:
        return tuple(int(n) for n in np.clip(rng.lognormal(5.6, 0.7, count), 12, 4096))

    packing = tuple(tuple((lengths(9), lengths(8)) for _ in range(num_ranks)) for _ in range(12))
    # a padding loader fits fewer samples in a batch
    padded = tuple(
        tuple(tuple((*a, *b)[i : i + 5] for i in range(0, len(a) + len(b), 5)) for a, b in step) for step in packing
    )
    edges = tuple(range(0, 4097, 128))
    counts = np.histogram(np.clip(rng.lognormal(5.6, 0.7, 60_000), 12, 4096), edges)[0]
    return PlanFacts(
        num_steps=num_steps, num_samples=60_000, num_eval_samples=1200, samples_per_step=64, micro_batch_tokens=8192,
        epochs=3.0, num_tokens=num_steps * 22_000, num_label_tokens=num_steps * 9_000, padding_avoided=0.57,
        balance=0.996, memory_bytes=int(31.2 * GIB), length_edges=edges, length_counts=tuple(counts.tolist()),
        packing=packing, padded=padded,
    )  # fmt: skip


def run_start(folder: Path, num_steps: int, num_ranks: int, rng: np.random.Generator, settings: Any = ()) -> RunStart:
    settings = {**SETTINGS, **dict(settings)}
    return RunStart(
        name=settings["name"], folder=str(folder), method="lora", model="Qwen/Qwen3-8B", data="chats",
        started_at=STARTED_AT, first_started_at=STARTED_AT, resumed_step=None, num_ranks=num_ranks, device="cuda",
        gpus=(GpuFacts("NVIDIA H200", 141 * GIB),) * num_ranks, dtype="bfloat16", strategy="ddp",
        num_parameters=8_190_735_360, num_trained_parameters=87_293_952, model_text="Qwen3ForCausalLM(\n  ...\n)",
        versions={"flatout": "0.2.0", "torch": "2.11.0"}, settings=settings,
        plan=plan_facts(num_steps, num_ranks, rng),
    )  # fmt: skip


def step_record(step: int, num_steps: int, num_ranks: int, rng: np.random.Generator, best_loss: float) -> StepRecord:
    done = step / num_steps
    loss = best_loss + 1.9 * math.exp(-9 * done) + 0.25 * (1 - done) + rng.normal(0, 0.06)
    slow = 1.0 + 0.25 * (0.45 < done < 0.5)  # one rank falls behind for a while
    busy = tuple(float(x) for x in rng.normal(0.31, 0.004, num_ranks) * np.array([slow, *[1.0] * (num_ranks - 1)]))
    forward, backward, wait = 0.11 + rng.normal(0, 0.002), 0.2 + rng.normal(0, 0.003), abs(rng.normal(0, 0.004))
    save = 0.03 if step % 500 == 1 and step > 1 else 0.0
    step_s = forward + backward + wait + save + 0.021 + 0.012 + abs(rng.normal(0.004, 0.001)) + 8.0 * (step == 1)
    tokens, warm = int(rng.normal(22_000, 900)), min(1.0, step / (0.03 * num_steps))
    return StepRecord(
        step=step, num_steps=num_steps, epoch=3 * done, loss=max(0.01, loss),
        token_accuracy=min(0.99, 0.45 + 0.3 * (1 - math.exp(-6 * done)) + rng.normal(0, 0.01)),
        lr=2e-4 * warm * 0.5 * (1 + math.cos(math.pi * done)),
        grad_norm=0.4 + 2.5 * math.exp(-20 * done) + abs(rng.normal(0, 0.08)) + (3.0 if rng.random() < 0.002 else 0),
        num_samples=64, num_tokens=tokens, num_label_tokens=int(tokens * 0.41), num_micro_batches=2 * num_ranks,
        tokens_per_s=tokens / step_s, label_tokens_per_s=0.41 * tokens / step_s, step_s=step_s, data_wait_s=wait,
        flops_per_s=2.1e15, mfu=0.53 * 0.36 / step_s, padding_avoided=float(np.clip(rng.normal(0.57, 0.03), 0, 0.9)),
        balance=min(1.0, 0.996 + rng.normal(0, 0.001)), peak_memory_bytes=int(30.4 * GIB), elapsed_s=step * 0.36 + 8,
        busy_min_s=min(busy), busy_max_s=max(busy), rank_busy_s=busy if num_ranks > 1 else (), num_ranks=num_ranks,
        processed_tokens_per_s=tokens * 1.004 / step_s, tokens_per_s_per_rank=tokens / step_s / num_ranks,
        forward_s=forward, backward_s=backward, gradient_sum_s=0.021, checkpoint_wait_s=save, optimizer_s=0.012,
        memory_bytes=int((27 + rng.normal(0, 0.2)) * GIB), reserved_memory_bytes=int(32 * GIB),
        gpu_watts=8 * (610 + 20 * math.sin(step)), gpu_use=0.97 + 0.02 * math.sin(step),
        peak_reserved_memory_bytes=int(33 * GIB), mean_peak_memory_bytes=int(30 * GIB), eta_s=(num_steps - step) * 0.36,
    )  # fmt: skip


def write_synthetic_run(
    folder: Path, *, num_steps: int = 2000, stop_after: int | None = None, num_ranks: int = 8, seed: int = 0,
    num_evals: int = 8, settings: Any = (), best_loss: float = 1.05,
) -> Path:  # fmt: skip
    """Write a run of `num_steps` steps; one that stops earlier has no end.json, as a killed run."""
    rng = np.random.default_rng(seed)
    writer = RunFolderWriter(folder)
    writer.on_start(run_start(folder, num_steps, num_ranks, rng, settings))
    every = max(1, num_steps // num_evals)
    for step in range(1, (stop_after or num_steps) + 1):
        record = step_record(step, num_steps, num_ranks, rng, best_loss)
        writer.on_step(record)
        if step % every == 0 or step == num_steps:
            loss = best_loss + 0.05 + 1.7 * math.exp(-8 * step / num_steps) + 0.12 * (step / num_steps) ** 3
            by_data = {"chats": EvalFigures(loss - 0.1, 0.7, 90_000), "code": EvalFigures(loss + 0.1, 0.65, 80_000)}
            is_best = step <= 0.6 * num_steps
            writer.on_eval(EvalRecord(step, loss, 0.5 + 0.2 * step / num_steps, 170_000, is_best, 4.2, 41_000, by_data))
            said = ANSWERS[min(len(ANSWERS) - 1, len(ANSWERS) * step // num_steps)]
            answers = tuple(Answer(prompt, said, reference) for prompt, reference in PROMPTS)
            writer.on_answers(AnswersRecord(step, answers, 1.3))
            writer.on_event("saved", {"step": step, "path": f"checkpoints/step-{step}", "staged_s": 0.02})
    half = num_steps // 2
    writer.on_event("skipped", {"step": half, "why": "the gradient norm is not finite"})
    writer.on_event("straggler", {"rank": 0, "step": half, "busy_s": 0.39, "others_s": 0.31})
    if stop_after is None:
        writer.on_end(RunEnd("complete", 0, STARTED_AT + num_steps * 0.36, final_dir=str(folder / "final")))
    return folder
