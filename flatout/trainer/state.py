"""The state of one run: made by setup, used by the loop."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType

import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.checkpoint.write import Checkpoints
from flatout.checkpoint.write_async import Saver
from flatout.config.schema import Config
from flatout.errors import PreemptedError
from flatout.io.stop_signals import StopSignals
from flatout.models.auxiliary_loss import AuxiliaryLoss
from flatout.models.lora.fused import FusedLayers
from flatout.models.model_with_loss import ModelWithLoss
from flatout.parallel.fault_tolerance.peer_watch import PeerWatch
from flatout.parallel.process_group import choose_device
from flatout.parallel.rank import Rank
from flatout.parallel.strategies.protocol import Strategy
from flatout.planner.devices import Device
from flatout.planner.memory.budget import MemoryDecision
from flatout.planner.steps.step_plan import StepPlan
from flatout.planner.steps.training_plan import TrainingPlan
from flatout.rollout.in_process import InProcess
from flatout.rollout.rewards.pool import Rewards
from flatout.track.callback import Reporter
from flatout.trainer.batch_loader import BatchLoader
from flatout.trainer.planned_run import EvalSet, KLPairs, PlannedRun, plan_run
from flatout.trainer.rank_meter import RankMeter
from flatout.trainer.steps_and_memory import InexactReasons


@dataclass(slots=True)
class Progress:
    """How far the run is."""

    step: int = 0
    """Completed steps of the plan."""
    num_updates: int = 0
    """Steps that changed weights."""
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
    """The metric that `eval.best` names, at `best_step`."""
    best_step: int | None = None
    round_store: str | None = None
    """What identifies the answers of the round that `step` is in or has ended; None without any."""
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
    """What changes during a run besides its progress."""

    micro_batch_cap: int | None = None
    """The most tokens of a micro-batch on this rank, set after an out-of-memory error; None: as planned."""
    num_in_flight: int = 0
    """Launched updates whose totals the host has not read yet."""
    loss_history: LossHistory = LossHistory()
    first_loss: float | None = None
    """The loss of this process's first step."""
    has_diverged: bool = False
    reference_weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The reference's values of trained weights, by name on the host, for rounds that compute it later; this rank's
    shards. Empty if nobody needs them."""
    not_finite: set[str] = field(default_factory=set)
    """Metrics of the objective that were reported as not finite."""
    sampler: InProcess | None = None
    """The sampler of `answers.sampler_of`, once made."""
    rewards: Rewards | None = None
    """What scores sampled answers, while a run of rounds is in its steps."""
    told_unscored: set[str] = field(default_factory=set)
    """Reward functions whose missing scores were told."""
    replays: bool = False
    """Whether it takes steps again: it samples no answers, and does not evaluate before the first one."""


class StopRequest(StopSignals):
    """A stop signal as a flag, read between micro-batches: `with StopRequest() as stop: ... if stop.requested`.

    A second signal raises KeyboardInterrupt immediately; a save in progress then leaves only temporary files, never a
    partial checkpoint. After a PreemptedError, further signals but Ctrl-C are ignored, unless Ctrl-C asked for the
    stop: the process is exiting, and its launcher may signal now (another rank was asked to stop first) or again
    (torch's does when another node leaves), which would turn "stopped and saved" into "killed".
    """

    def __init__(self, *, settle_s: float = 0.5) -> None:
        super().__init__(self._interrupt, settle_s=settle_s)

    @property
    def requested(self) -> bool:
        return self.number is not None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.number != signal.SIGINT and isinstance(error, PreemptedError):
            # not SIG_IGN, which child processes would inherit
            self._found |= dict.fromkeys(self._found.keys() - {signal.SIGINT}, lambda number, frame: None)
        super().__exit__(kind, error, trace)

    def _interrupt(self) -> None:
        raise KeyboardInterrupt


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

    def planned_again(self, gpu: Device | None, inexact_reasons: InexactReasons) -> Setup:
        """Return the same data and samples of each step, planned anew for this GPU and these reasons."""
        old = self.planned
        planned = plan_run(self.config, old.data, self.reporter, self.rank, gpu, inexact_reasons)
        return replace(self, planned=replace(planned, fingerprints=old.fingerprints))


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Everything the loop needs, made by `build_run`. Fields keep their objects; a step changes what these hold."""

    config: Config
    rank: Rank
    device: torch.device
    reporter: Reporter
    planned: PlannedRun
    loaders: tuple[BatchLoader, ...]
    """Those of `PlannedRun.data_sets`, in their order."""
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
    """The plan's, at the level at which layers recompute: `full` where they do not compile as planned."""
    fused_lora: FusedLayers
    watch: PeerWatch
    rank_meter: RankMeter
    aux_loss: AuxiliaryLoss
    why_no_graphs: str | None
    """Why the run records no CUDA graphs; None: it does."""
    progress: Progress = field(default_factory=Progress)
    state: LoopState = field(default_factory=LoopState)
    stop: StopRequest = field(default_factory=StopRequest)

    def close(self) -> None:
        """End the threads that save and read ahead, and free the sampler."""
        self.state.sampler = None
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
