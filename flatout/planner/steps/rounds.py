"""Rounds of rollouts: how many steps they take before any is sampled, and the steps of one round once it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flatout.errors import counted
from flatout.planner.steps.order import permute
from flatout.planner.steps.step_plan import StepPlan, assemble
from flatout.planner.steps.training_plan import TrainingPlan
from flatout.planner.steps.units import Samples


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of a run, known before it starts."""

    num_rounds: int
    prompts: int
    """Prompts of a round, each a unit of `group` answers."""
    group: int
    steps: int
    """Optimizer steps of a round."""
    num_prompts: int
    """Prompts of the data set."""

    def places(self, index: int, seed: int) -> NDArray[np.int64]:
        """Return the places of a round's prompts among all, int64 (prompts,): each epoch takes every prompt once."""
        numbers = np.arange(index * self.prompts, (index + 1) * self.prompts)
        epochs = numbers // self.num_prompts
        parts = [
            permute(numbers[epochs == epoch] % self.num_prompts, self.num_prompts, seed=seed, epoch=int(epoch))
            for epoch in np.unique(epochs)
        ]
        return np.concatenate(parts)

    @property
    def units_per_step(self) -> int:
        """The most units of a step."""
        return -(-self.prompts // self.steps)

    def epochs_after(self, num_steps: int) -> float:
        """Return the passes over the prompts after so many steps."""
        return num_steps * self.prompts / self.steps / self.num_prompts

    def __str__(self) -> str:
        epochs = counted(self.epochs_after(self.num_rounds * self.steps), "epoch", ".4g")
        return (
            f"{counted(self.num_rounds, 'round')} of {self.prompts:,} prompts with {self.group} answers each, "
            f"{counted(self.steps, 'step')} a round; {epochs} of {self.num_prompts:,} prompts"
        )


@dataclass(frozen=True, eq=False)
class BoundsPlan(TrainingPlan):
    """A run of rounds before any is sampled: every step has as many samples as it may have, of the greatest length."""

    rounds: Rounds = field(kw_only=True)

    @classmethod
    def of(cls, plan: TrainingPlan, rounds: Rounds, **values: Any) -> Self:
        """Return the plan of one round's bounds as that of the whole run, or with other `values`."""
        own = {one.name: getattr(plan, one.name) for one in fields(TrainingPlan)}
        own["num_steps"] = rounds.num_rounds * rounds.steps
        return cls(**{**own, **values}, rounds=rounds)

    @property
    def batch_bounds(self) -> dict[str, int]:
        """As a plan has them; answers may be so short that one pass takes a whole step."""
        num_samples = self.most_samples_per_step
        return {"max_documents": num_samples, "max_prefixes": num_samples // 2 if self.shares_prefixes else 0}

    def epoch_after(self, step: StepPlan) -> float:
        """Return the passes over the prompts that are complete after this step."""
        return self.rounds.epochs_after(step.index + 1)

    def describe(self, ranks_per_group: int = 1) -> str:
        """Describe the plan in one line."""
        return str(self.rounds)

    def of_round(self, index: int, samples: Samples, why_empty: str = "too few groups have a signal") -> RoundPlan:
        """Return the steps of a round with these samples, which may be none."""
        return RoundPlan.of(self, self.rounds, samples=samples, index=index, why_empty=why_empty)


@dataclass(frozen=True, eq=False)
class RoundPlan(BoundsPlan):
    """The steps of one round, numbered as those of the whole run, which `num_steps` counts.

    Its units follow each other in the order of its prompts. Each step takes an equal share of them, within one; a step
    of a round with fewer units than steps may have none, and is skipped.
    """

    index: int = field(kw_only=True)

    @property
    def numbers(self) -> range:
        """The steps of the run that the round has."""
        return range(self.index * self.rounds.steps, (self.index + 1) * self.rounds.steps)

    def step(self, index: int) -> StepPlan:
        """Return the plan of one step of the run. Raises IndexError for one of another round."""
        if index not in self.numbers:
            raise IndexError(f"step {index} is not one of round {self.index}")
        place, starts = index - self.numbers.start, np.append(self.samples.unit_starts, len(self.samples))
        unit, end = (number * self.num_units // self.rounds.steps for number in (place, place + 1))
        if unit == end:
            return StepPlan(index, self.index, (), 0, 0, ((),) * self.batch_layout.num_ranks, 1.0)
        samples = self.samples.take(np.arange(starts[unit], starts[end]))
        epoch = int(self.rounds.epochs_after(index))
        return next(assemble(samples, end - unit, self.batch_layout, epoch=epoch, first_index=index))

    def steps(self, start: int = 0) -> Iterator[StepPlan]:
        """Yield the round's steps from `start` on."""
        yield from (self.step(index) for index in self.numbers if index >= start)
