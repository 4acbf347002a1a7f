"""Run one training step and compare its loss and gradients with the reference: a row of `flatout verify`'s table."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from flatout.checkpoint.write import Checkpoints
from flatout.config.objective import POLICY_LOGPROB, REFERENCE, REFERENCE_TOKENS
from flatout.config.schema import Config
from flatout.data.reference_column import lacks_reference
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import read_json
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.rank import Rank
from flatout.planner.steps.step_plan import StepPlan
from flatout.track.callback import Reporter
from flatout.trainer.build import build_run
from flatout.trainer.passes import free_memory
from flatout.trainer.planned_run import PlannedRun, open_and_plan
from flatout.trainer.state import Setup, TrainingRun
from flatout.trainer.step import accumulate_gradients
from flatout.trainer.steps_and_memory import weakest_gpu

GRADIENTS, FACTS, LOGPROBS = "gradients.safetensors", "facts.json", "reference.json"
# a parameter's difference is relative to the norm of its gradient, but at least to this share of the global norm:
# some gradients are zero by symmetry (the bias of keys), so only rounding is left of them
FLOOR_SHARE = 0.01
# a norm below this counts as 0: its square underflows in fp32
LEAST_NORM = 1e-19

Verdict = Literal["ok", "FAIL", "left out", "noise"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way of computing the step, compared with the reference.

    Differences are relative; `cosine` is over all gradients. `worst_parameter` has the largest difference of all
    gradients, `worst_difference`. `limit` bounds the three differences. `note` says why a row failed or was left out. A
    `noise` row is only reported. A row with `share` compares no gradients: it says how much of the adapters' change
    arrives, on average over layers, and `worst_difference` is how far it is from 1, in the layer `worst_parameter`.
    """

    case: str
    num_ranks: int = 1
    num_micro_batches: int = 1
    loss: float | None = None
    loss_difference: float | None = None
    worst_difference: float | None = None
    worst_parameter: str | None = None
    norm_difference: float | None = None
    cosine: float | None = None
    share: float | None = None
    limit: float = 0.0
    verdict: Verdict = "FAIL"
    note: str = ""

    @property
    def largest(self) -> float:
        """The largest of the three differences (of a share, the one); infinite when one is missing or not finite."""
        differences = [self.worst_difference]
        if self.share is None:
            differences += [self.loss_difference, self.norm_difference]
        return max(math.inf if value is None or not math.isfinite(value) else value for value in differences)

    def judged(self, limit: float) -> Comparison:
        """Return the row with its verdict under this limit; a row with a note, such as on missing gradients, fails."""
        return replace(self, limit=limit, verdict="ok" if self.largest <= limit and not self.note else "FAIL")

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; non-finite numbers become None."""
        values = asdict(self)
        odd = {key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
        return values | dict.fromkeys(odd)


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference in a folder: every gradient as a tensor, loss and norm as JSON."""

    folder: Path
    loss: float
    norm: float

    @classmethod
    def write(cls, folder: Path, loss: float, gradients: Mapping[str, Tensor]) -> Reference:
        folder.mkdir()
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        save_file({name: gradient.detach().contiguous() for name, gradient in gradients.items()}, folder / GRADIENTS)
        DurableIO().write_json(folder / FACTS, {"loss": loss, "norm": norm})
        return cls(folder, loss, norm)

    @classmethod
    def read(cls, folder: Path) -> Reference:
        """Read a reference from its folder. Raises CheckpointError if its facts are missing."""
        facts = read_json(folder / FACTS)
        return cls(folder, facts["loss"], facts["norm"])

    def compare(
        self, case: str, loss: float, norm: float, gradients: Iterable[tuple[str, Tensor | None]]
    ) -> Comparison:
        """Compare a loss, a gradient norm and named gradients (None: all zeros) with the reference; no name twice."""
        worst, worst_name, dot, ours_squared = 0.0, None, 0.0, 0.0
        with safe_open(self.folder / GRADIENTS, "pt") as file:
            missing, odd = set(file.keys()), []
            for name, gradient in gradients:
                if name not in missing:
                    odd.append(name)
                    continue
                missing.remove(name)
                truth = file.get_tensor(name)
                ours = torch.zeros_like(truth) if gradient is None else gradient.detach().reshape(truth.shape)
                truth, ours = truth.to(ours.device, torch.float64), ours.double()
                floor = max(float(truth.norm()), FLOOR_SHARE * self.norm, LEAST_NORM)
                difference = float((ours - truth).norm()) / floor
                # comparisons with NaN are always false, so count it as infinite
                difference = difference if math.isfinite(difference) else math.inf
                dot += float((ours * truth).sum())
                ours_squared += float(ours.square().sum())
                if difference > worst or worst_name is None:
                    worst, worst_name = difference, name
            # a missing gradient counts as zeros: text does not reach a vision tower, for example
            odd += [name for name in missing if file.get_tensor(name).any()]
        return Comparison(
            case=case,
            loss=loss,
            loss_difference=abs(loss - self.loss) / max(abs(self.loss), 1e-12),
            worst_difference=worst,
            worst_parameter=worst_name,
            norm_difference=abs(norm - self.norm) / max(self.norm, LEAST_NORM),
            cosine=dot / max(math.sqrt(ours_squared) * self.norm, 1e-300),
            note=f"{len(odd)} gradients have no counterpart, such as {min(odd)}" if odd else "",
        )


def plan_quietly(config: Config, rank: Rank) -> PlannedRun:
    """Plan the run without logging, with the reference that plain transformers has computed if the run's folder has it.

    So that no other is computed, samples of other steps have a value too. Of tokens it is what the policy's is.
    """
    planned = open_and_plan(config, Reporter(), rank, weakest_gpu(config, ControlGroup(rank)))
    for data_set in planned.data_sets if REFERENCE_TOKENS in planned.objective.needed_columns else ():
        if lacks_reference(store := data_set.store, [REFERENCE_TOKENS]):
            store.extra[REFERENCE_TOKENS][:] = store.extra.get(POLICY_LOGPROB, 0.0)
    if (file := config.folder / LOGPROBS).exists():
        stores = [data_set.store for data_set in planned.data_sets]
        for store in stores:
            store.extra[REFERENCE][:] = 0.0
        known = read_json(file)
        for store, logprobs in zip(stores, known["logprobs"], strict=False):
            store.extra[REFERENCE][known["ids"]] = logprobs
    return planned


@contextmanager
def set_up_quietly(config: Config, planned: PlannedRun, rank: Rank, folder: Path) -> Iterator[TrainingRun]:
    """Set up the run as `flatout train` does, but without its checkpoints; its memory is freed on exit."""
    checkpoints = Checkpoints(folder, keep=1, on_event=lambda kind, facts: None)
    run = build_run(Setup(config, planned, checkpoints, Reporter(), rank))
    # the reference has no dropout; everything else stays in training mode, which recomputation needs
    for module in run.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
        # attention gets its share as a number
        for name in [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]:
            setattr(module, name, 0.0)
    try:
        yield run
    finally:
        run.close()
        device = run.device
        del run
        free_memory(device)


def measure(run: TrainingRun, step: StepPlan, reference: Reference, case: str) -> Comparison:
    """Compare one step's loss, gradients and norm over all ranks with the reference; only rank 0's row is filled."""
    run.optimizer.zero_grad(set_to_none=True)
    sums = accumulate_gradients(run, step)
    run.strategy.sum_gradients(run.parameters)
    sums = run.strategy.sum_values(sums)
    run.scaler.unscale_(run.optimizer)
    norm = run.strategy.grad_norm(run.parameters).item()
    run.scaler.update()
    # a generator, so that only one sharded gradient at a time is gathered
    grads = ((name, parameter.grad) for name, parameter in run.named_parameters.items())
    gradients = ((name, grad.full_tensor() if isinstance(grad, DTensor) else grad) for name, grad in grads)
    if run.rank.is_first:
        row = reference.compare(case, sums[0].item() / run.planned.normalizers.loss_normalizer(step), norm, gradients)
    else:
        # gathering a sharded gradient is collective
        deque(gradients, maxlen=0)
        row = Comparison(case)
    return replace(row, num_ranks=run.rank.world, num_micro_batches=max(map(len, step.by_rank)))
