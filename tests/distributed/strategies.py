"""One worker for all strategies: every rank builds and steps each case in turn; the first rank compares with one
process. Started by test_strategies.py (gloo, CPU) and test_strategies_gpu.py (NCCL)."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from spawned_ranks import ColdProcess, start_warm_ranks
from torch import Tensor
from warm_process import WarmProcess

from flatout.checkpoint.write import Checkpoints
from flatout.config.read import make_config
from flatout.errors import NumericError
from flatout.models.compile import layers as compiling
from flatout.models.load.model import LoadedModel
from flatout.parallel.process_group import leave_group
from flatout.parallel.rank import Rank
from flatout.parallel.shards import as_global, global_tensors, local_part
from flatout.planner.steps.step_plan import MicroBatch
from flatout.rollout.sampler import SamplingParams
from flatout.track.callback import Reporter
from flatout.trainer.answers import generate, sampling
from flatout.trainer.build import build_run
from flatout.trainer.evaluate import WorstSamples, evaluate
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.state import Setup, TrainingRun
from flatout.trainer.step import launch_step


def build(values: dict[str, Any], folder: Path, rank: Rank) -> TrainingRun:
    """A Run by the public functions, without its loop and checkpoints."""
    config = make_config({**values, "run_dir": str(folder)})
    reporter = Reporter()
    planned = open_and_plan(config, reporter, rank)
    checkpoints = Checkpoints(folder, keep=1, on_event=reporter.event)
    if torch.cuda.is_available():
        # graphs of another case, made under another autocast, are no graphs of this one
        torch._dynamo.reset()
    return build_run(Setup(config, planned, checkpoints, reporter, rank))


def whole(tensor: Tensor, parameter: Tensor | None = None) -> Tensor:
    """All of a tensor, or of a parameter's gradient, on the CPU; every rank must call it."""
    found = global_tensors({"it": as_global(tensor, parameter)}, keep=True)
    return found["it"].cpu().clone()


def weight_of(run: TrainingRun, parameter: Tensor) -> Tensor:
    """The weight where it lies."""
    return run.strategy.engine_state.weight(parameter) if run.strategy.engine_state else parameter


def never_recompiling(run: TrainingRun) -> AbstractContextManager[object]:
    """Within, a layer that start-up compiled for other weights than the strategy's raises."""
    if run.device.type == "cpu" or run.config.compile == "off":
        return nullcontext()
    import torch._dynamo.config as dynamo_config

    return dynamo_config.patch(error_on_recompile=True)


def answered(run: TrainingRun) -> Tensor:
    """The tokens that answer the prompts; none where rounding may change the likeliest token, in bf16 or quantized."""
    shares = sampled_in_shares(run) if run.planned.prompts else None
    answers = generate(run, run.planned.prompts) if run.planned.prompts else None
    if answers is None or shares is None or run.dtype == torch.bfloat16 or run.config.base.storage != "model":
        return torch.zeros(0)
    tokens = [token_id for answer in answers for token_id in (-1, *answer)]
    return torch.cat([torch.tensor(tokens, dtype=torch.float64), shares.flatten().cpu()])


def sampled_in_shares(run: TrainingRun) -> Tensor:
    """Tokens drawn after each prompt; where weights are whole, by all ranks but the first, which takes no pass."""
    prompts = [prompt.token_ids for prompt in run.planned.prompts.prompts] if run.planned.prompts else []
    is_shared = run.planned.parallel_layout.lockstep_in_inference
    numbers, num_others = range(len(prompts)), run.rank.world - 1
    if num_others and not is_shared:
        numbers = numbers[:0] if run.rank.is_first else numbers[run.rank.index - 1 :: num_others]
    drawn = torch.zeros(len(prompts), 2, 3, dtype=torch.float64, device=run.device)
    with sampling(run) as sampler:
        params = SamplingParams(3, temperature=0.7, seed=run.config.seed)
        found = sampler.sample([prompts[number] for number in numbers], 2, params, prompt_numbers=numbers)
    for number, group in zip(numbers, found, strict=True):
        drawn[number] = torch.tensor([one.token_ids for one in group])
    return drawn if is_shared else run.strategy.sum_values(drawn)


def take(run: TrainingRun, num_steps: int) -> dict[str, Any]:
    """Loss and norm of each step, gradients of the first, weights and evaluation after the last."""
    losses, norms, grads = [], [], {}
    for index, step in enumerate(run.plan.steps()):
        if index == num_steps:
            break
        with never_recompiling(run):
            outcome = launch_step(run, step)()
        assert outcome is not None
        run.progress.advance(step, updated=True, num_naive_tokens=1)
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
        if index == 0:
            named = run.named_parameters.items()
            # after the clip, which scales all alike
            grads = {name: whole(parameter.grad, parameter) for name, parameter in named if parameter.grad is not None}
    # before an evaluation, whose passes gather weights
    answers = answered(run)
    total, _ = evaluate(run, WorstSamples(run))
    return {
        "loss": torch.tensor(losses, dtype=torch.float64),
        "norm": torch.tensor(norms, dtype=torch.float64),
        "grads": grads,
        "weights": {name: whole(weight_of(run, parameter)) for name, parameter in run.named_parameters.items()},
        "eval": torch.tensor([total.loss, total.token_accuracy], dtype=torch.float64),
        "answers": answers,
    }


def take_masked(run: TrainingRun) -> dict[str, Any]:
    """Loss and gradients of a step whose only label tokens are the first rank's; the others' passes carry no loss."""
    first = run.plan.step(0)
    lengths = run.plan.samples.lengths[run.plan.samples.indices_of(first.sample_ids)].tolist()
    (kept_length, kept), (other_length, other) = sorted(zip(lengths, first.sample_ids, strict=True))[-2:]
    num_label_tokens = int(run.plan.samples.num_label_tokens[run.plan.samples.indices_of((kept,))].sum())
    # ranks that share experts need passes of one size
    fill = max(kept_length, other_length) if run.plan.batch_layout.expert_ranks > 1 else 0
    labelled = MicroBatch((kept,), kept_length, num_label_tokens, fill_tokens=fill)
    silent = MicroBatch((other,), other_length, 0, is_filler=True, fill_tokens=fill)
    ranks = ((labelled,), *((silent,),) * (run.rank.world - 1))
    outcome = launch_step(run, replace(first, num_label_tokens=7, by_rank=ranks))()
    assert outcome is not None
    named = run.named_parameters.items()
    return {
        "loss": torch.tensor([outcome.loss], dtype=torch.float64),
        "grads": {name: whole(parameter.grad, parameter) for name, parameter in named if parameter.grad is not None},
    }


def difference(got: Any, expected: Any, *, rms: bool) -> float:
    """Largest difference, relative to the largest value, or `rms` both as root mean squares: AdamW divides a gradient
    by its own size, so single weights show the rounding of gradients near 0. The worst tensor of a dict."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
        return max((difference(got[name], expected[name], rms=rms) for name in expected), default=0.0)
    if not expected.numel():
        return 0.0
    assert got.shape == expected.shape, (got.shape, expected.shape)
    got, expected = got.double(), expected.double()
    size = torch.linalg.vector_norm if rms else lambda tensor: tensor.abs().max()
    error = float(size(got - expected)) / (float(size(expected)) or 1.0)
    return error if error == error else float("inf")


def take_stopped(run: TrainingRun) -> dict[str, Any]:
    """Weights after a step during which the last rank alone was asked to stop: those of before, on all ranks."""
    if run.rank.index == run.rank.world - 1:
        run.stop.__enter__()
        signal.raise_signal(signal.SIGTERM)
        run.stop.__exit__(None, None, None)
    outcome = launch_step(run, run.plan.step(0))()
    # one process alone stops as well
    assert outcome is None
    return {"weights": {name: whole(parameter) for name, parameter in run.named_parameters.items()}}


def take_poisoned(run: TrainingRun) -> dict[str, Any]:
    """Weights after a step whose loss is not finite, the weight that made it so put back: no other one has moved."""
    last = list(run.named_parameters.values())[-1]
    kept = last.detach().clone()
    local_part(last.data).fill_(float("nan"))
    try:
        launch_step(run, run.plan.step(0))()
    except NumericError:
        last.data.copy_(kept)
        return {"weights": {name: whole(parameter) for name, parameter in run.named_parameters.items()}}
    raise AssertionError("a loss of NaN was trained on")


def inner_loss(loss: Any) -> Any:
    """The loss that DeepSpeed's engine wraps, or the loss itself."""
    return loss.engine.module if hasattr(loss, "engine") else loss


def take_proved(run: TrainingRun, num_steps: int) -> dict[str, Any]:
    """Steps after start-up's proof of compiled layers, which leaves nothing behind; here both sides run eagerly."""
    kept = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self, *args, **kwargs: None  # type: ignore[method-assign]
    try:
        loaded = LoadedModel(run.model, run.dtype, run.autocast, "transformers", ())
        outcome = compiling._compile(
            loaded, compiling.CompileOptions(64), 0.999, inner_loss(run.loss_module), run.loss_module
        )
    finally:
        torch.nn.Module.compile = kept  # type: ignore[method-assign]
    assert outcome.is_complete, outcome.line
    assert outcome.line.endswith("gradients equal eager ones (smallest cosine 1.000000)"), outcome.line
    assert not any(local_part(parameter.grad).any() for parameter in run.parameters if parameter.grad is not None)
    return take(run, num_steps)


def measure(run: TrainingRun, case: dict[str, Any]) -> dict[str, Any]:
    """What a case compares."""
    others = {"masked": take_masked, "stopped": take_stopped, "poisoned": take_poisoned}
    if case["kind"] == "proved":
        return take_proved(run, case["num_steps"])
    kind = case["kind"]
    return others[kind](run) if kind in others else take(run, case["num_steps"])


def held_share(run: TrainingRun) -> float:
    """The share of the quantized bytes that this rank holds; 1.0 where nothing is quantized."""
    stored = [parameter for parameter in run.model.parameters() if parameter.itemsize == 1]
    num_bytes = sum(parameter.numel() for parameter in stored)
    return sum(local_part(parameter).numel() for parameter in stored) / num_bytes if num_bytes else 1.0


def main(spec_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    torch.set_num_threads(1)
    rank = Rank.from_env()
    report = []
    for index, case in enumerate(spec["cases"]):
        run = build(case["values"], Path(spec["folder"]) / f"case-{index}", rank)
        got = measure(run, case)
        run.loader.close()
        if rank.is_first:
            expected = torch.load(case["reference"], weights_only=True)
            if run.strategy.engine_state:
                # it keeps the gradients to itself; the norm and the updates show them
                expected["grads"] = {}
            differences = {key: difference(got[key], expected[key], rms=key == "weights") for key in expected}
            num_fillers = sum(b.is_filler for step in run.plan.steps() for b in step.micro_batches)
            num_accumulated = max(len(micro) for step in run.plan.steps() for micro in step.by_rank)
            facts = {"num_fillers": num_fillers, "num_accumulated": num_accumulated, "held": held_share(run)}
            report.append({"name": case["name"], **facts, **differences})
    if rank.is_first:
        Path(spec["report"]).write_text(json.dumps(report))
    leave_group()


def reference(values: dict[str, Any], case: dict[str, Any], folder: Path, name: str) -> str:
    """One process's figures for a case, in a file."""
    run = build(values, folder / f"one-{name}", Rank())
    path = folder / f"{name}.pt"
    torch.save(measure(run, case), path)
    run.loader.close()
    return str(path)


def run_cases(cases: list[dict[str, Any]], folder: Path, num_ranks: int, timeout_s: float) -> dict[str, dict[str, Any]]:
    """Spawn the ranks once for all cases; the first rank's differences by the case's name."""
    report = folder / "report.json"
    spec = {"cases": cases, "folder": str(folder), "report": str(report)}
    spawn(Path(__file__), spec, folder, num_ranks, timeout_s)
    return {entry["name"]: entry for entry in json.loads(report.read_text())}


def spawn(script: Path, spec: dict[str, Any], folder: Path, num_ranks: int, timeout_s: float) -> None:
    """Run `script` as so many ranks with `spec` in a file; all must end well. Logs are `rank-N.log` in `folder`."""
    spec_path = folder / "spec.json"
    spec_path.write_text(json.dumps(spec))
    kind = ColdProcess if torch.cuda.is_available() else WarmProcess
    processes = start_warm_ranks(num_ranks, lambda _: [str(script), str(spec_path)], folder, kind)
    try:
        wait_for(processes, timeout_s)
    finally:
        for process in processes:
            process.kill()
    logs = "\n---\n".join(process.log.read_text()[-4000:] for process in processes)
    assert [process.wait() for process in processes] == [0] * num_ranks, logs


def wait_for(processes: Sequence[WarmProcess | ColdProcess], timeout_s: float) -> None:
    """Until all ended, or one failed: the others would wait for it for ever."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.05)
    raise TimeoutError(f"ranks still run after {timeout_s} s: {[process.poll() for process in processes]}")


if __name__ == "__main__":
    main(sys.argv[1])
