"""The state of one run: made by setup, used by the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.checkpoint.write import Checkpoints
from flatout.checkpoint.write_async import Saver
from flatout.config.schema import Config
from flatout.models.auxiliary_loss import AuxiliaryLoss
from flatout.models.lora.fused import FusedLayers
from flatout.models.model_with_loss import ModelWithLoss
from flatout.parallel.fault_tolerance.peer_watch import PeerWatch
from flatout.parallel.process_group import choose_device
from flatout.parallel.rank import Rank
from flatout.parallel.strategies.protocol import Strategy
from flatout.planner.memory.budget import MemoryDecision
from flatout.planner.steps.step_plan import StepPlan
from flatout.planner.steps.training_plan import TrainingPlan
from flatout.track.callback import Reporter
from flatout.trainer.batch_loader import BatchLoader
from flatout.trainer.data_sets import EvalSet, KLPairs
from flatout.trainer.planned_run import PlannedRun
from flatout.trainer.rank_meter import RankMeter
from flatout.trainer.stop_request import StopRequest


@dataclass(slots=True)
class Progress:
    """How far the run is. `step` counts completed steps of the plan, `num_updates` those that changed weights.

    `best_eval_loss` and `best_figure` (`eval.best`) are those of `best_step`.
    """

    step: int = 0
    num_updates: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_label_tokens: int = 0
    num_naive_tokens: int = 0
    elapsed_s: float = 0.0
    first_eval_loss: float | None = None
    last_eval_loss: float | None = None
    last_eval_step: int | None = None
    best_eval_loss: float | None = None
    best_figure: float | None = None
    best_step: int | None = None
    num_evals_without_best: int = 0
    stopped_early: bool = False

    def advance(self, step: StepPlan, *, updated: bool, num_naive_tokens: int) -> None:
        """Count one completed step; `num_naive_tokens` is what a padding loader would have computed."""
        self.step = step.index + 1
        self.num_updates += updated
        self.num_samples += len(step.sample_ids)
        self.num_tokens += step.num_tokens
        self.num_label_tokens += step.num_label_tokens
        self.num_naive_tokens += num_naive_tokens


@dataclass(frozen=True, slots=True)
class LossHistory:
    """Number, mean and variance of the losses so far, exponential over the last ones (`step_guards.py`)."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0


@dataclass(slots=True)
class LoopState:
    """What changes during a run besides its progress.

    `micro_batch_cap` is the maximum tokens per micro-batch on this rank, set after an out-of-memory error; None: as
    planned. `num_in_flight` counts launched updates whose totals the host has not read yet. `loss_history` is kept for
    `faults.spike`. `first_loss` is that of this process's first step, `has_diverged` whether a later one told so.
    `not_finite` has the objective's metrics that were told to be no finite numbers.
    """

    micro_batch_cap: int | None = None
    num_in_flight: int = 0
    loss_history: LossHistory = LossHistory()
    first_loss: float | None = None
    has_diverged: bool = False
    not_finite: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Setup:
    """What every stage of building a run reads."""

    config: Config
    planned: PlannedRun
    checkpoints: Checkpoints
    reporter: Reporter
    rank: Rank
    watch: PeerWatch | None = None

    @property
    def device(self) -> torch.device:
        return choose_device(self.config.wanted_device, self.rank)


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Everything the loop needs, made by `build_run`. Fields keep their objects; a step changes what these hold.

    `memory` is the plan's, at the level at which layers recompute: `full` where they do not compile as planned.
    """

    config: Config
    rank: Rank
    device: torch.device
    reporter: Reporter
    planned: PlannedRun
    # those of `PlannedRun.data_sets`, in their order
    loaders: tuple[BatchLoader, ...]
    model: PreTrainedModel
    loss_module: ModelWithLoss
    dtype: torch.dtype
    autocast: bool
    named_parameters: Mapping[str, nn.Parameter]
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    checkpoints: Checkpoints
    saver: Saver
    memory: MemoryDecision
    fused_lora: FusedLayers
    watch: PeerWatch
    rank_meter: RankMeter
    aux_loss: AuxiliaryLoss
    progress: Progress = field(default_factory=Progress)
    state: LoopState = field(default_factory=LoopState)
    stop: StopRequest = field(default_factory=StopRequest)

    def close(self) -> None:
        """End the threads that save and read ahead."""
        self.saver.close()
        for loader in self.loaders:
            loader.close()

    @property
    def loader(self) -> BatchLoader:
        """The loader of the run's steps."""
        return self.loaders[0]

    def loader_of(self, data_set: KLPairs | EvalSet) -> BatchLoader:
        """Return the loader of one of `PlannedRun.data_sets`."""
        loaders = zip(self.planned.data_sets, self.loaders, strict=True)
        return next(loader for planned, loader in loaders if planned is data_set)

    @property
    def plan(self) -> TrainingPlan:
        return self.planned.plan

    @property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        return self.planned.eval_sets

    @property
    def data_parallel_rank(self) -> int:
        """The index of this process's micro-batches in `StepPlan.by_rank`."""
        return self.planned.parallel_layout.data_parallel_rank_of(self.rank.index)

    @property
    def shares_passes(self) -> bool:
        """Whether other ranks take part in this one's passes, so that none may be left out or repeated."""
        return self.plan.batch_layout.lockstep or self.planned.parallel_layout.context_ranks > 1

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters as the optimizer holds them; flat ones if it flattens them."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
