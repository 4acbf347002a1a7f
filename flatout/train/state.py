"""The values of one run: what setup makes and the loop uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.config.schema import Config
from flatout.models.head import PackedLoss
from flatout.models.joined import JoinedLayers
from flatout.parallel.rank import Rank
from flatout.parallel.strategy import Strategy
from flatout.parallel.watch import Watch
from flatout.plan.budget import MemoryDecision
from flatout.plan.steps import RunPlan
from flatout.plan.types import StepPlan
from flatout.track.record import Tracker
from flatout.train.busy import BusyClock
from flatout.train.checkpoint import Checkpoints
from flatout.train.feed import Feed
from flatout.train.guards import StopRequest
from flatout.train.saver import Saver


@dataclass(slots=True)
class Progress:
    """Where the run is. `step` counts completed steps of the plan, `num_updates` those that changed weights."""

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
    best_step: int | None = None
    num_evals_without_best: int = 0
    stopped_early: bool = False

    def advance(self, step: StepPlan, *, updated: bool, num_naive_tokens: int) -> None:
        """Count one completed step; `num_naive_tokens` is what a padding loader would have computed for it."""
        self.step = step.index + 1
        self.num_updates += updated
        self.num_samples += len(step.sample_ids)
        self.num_tokens += step.num_tokens
        self.num_label_tokens += step.num_label_tokens
        self.num_naive_tokens += num_naive_tokens

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)


@dataclass(slots=True)
class Run:
    """Everything the loop needs, made by setup in the order of these fields."""

    config: Config
    rank: Rank
    device: torch.device
    tracker: Tracker
    plan: RunPlan
    feed: Feed
    eval_plan: StepPlan | None
    eval_feed: Feed | None
    model: PreTrainedModel
    loss: PackedLoss
    dtype: torch.dtype
    autocast: bool
    tokenizer_name: str
    named_parameters: Mapping[str, nn.Parameter]
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    checkpoints: Checkpoints
    saver: Saver
    fingerprints: Mapping[str, Any]
    memory: MemoryDecision
    joined: JoinedLayers
    watch: Watch
    busy: BusyClock
    # what running out of memory taught: no micro-batch of this rank is larger from then on
    cap_tokens: int | None = None
    # updates launched whose figures the host has not read
    num_in_flight: int = 0
    progress: Progress = field(default_factory=Progress)
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters as the optimizer holds them: flat ones where it does."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.config.folder
