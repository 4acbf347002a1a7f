"""A user's own objective: tokens with weights, against the same sum in plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from flatout.data.token_store import TokenStore
from flatout.errors import CheckpointError, DataError, UsageError
from flatout.models.objective import LossSums, TokenHead
from flatout.models.packed import PackedBatch
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.trainer.planning import plan_run
from flatout.trainer.run import train


class WeightedTokens:
    """Tokens with even ids count `even` times."""

    def __init__(self, even: float) -> None:
        self.name, self.even = f"weighted_tokens({even})", even

    def sample_divisor(self, token_ids: NDArray[Any], loss_mask: NDArray[Any]) -> float:
        labels = token_ids[1:][loss_mask[1:]]
        return float(np.where(labels % 2 == 0, self.even, 1.0).sum())

    def rows(self, batch: PackedBatch) -> torch.Tensor:
        return batch.label_rows

    def loss_sums(self, rows: torch.Tensor, batch: PackedBatch, head: TokenHead) -> LossSums:
        losses, is_correct = head.token_losses(rows, batch.label_ids)
        return LossSums((losses * torch.where(batch.label_ids % 2 == 0, self.even, 1.0)).sum(), is_correct.sum())


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda sums: sums.loss_sum, "loss_sums returned a Tensor"),
        (lambda sums: None, "loss_sums returned a NoneType"),
        (lambda sums: tuple(sums), "loss_sums returned a tuple"),
        (lambda sums: LossSums(sums.loss_sum[None], sums.num_correct), r"LossSums of shape \(1,\) and shape \(\)"),
        (lambda sums: LossSums(sums.loss_sum, 3), r"LossSums of shape \(\) and int"),
        (lambda sums: sums, None),
    ],
)
def test_a_wrong_return_is_one_sentence(tiny: Any, tmp_path: Path, returned: Any, said: str | None) -> None:
    class Returns(WeightedTokens):
        def loss_sums(self, rows: torch.Tensor, batch: PackedBatch, head: TokenHead) -> LossSums:
            found: LossSums = returned(super().loss_sums(rows, batch, head))
            return found

    config = tiny.config(tmp_path / "run", batch={"max_steps": 1})
    if said is None:
        train(config, objective=Returns(2.0))
        return
    with pytest.raises(UsageError, match=f"objective weighted_tokens.2.0.: .*{said}.*; expected LossSums"):
        train(config, objective=Returns(2.0))


def test_a_wrong_divisor_is_one_sentence(tiny: Any, tmp_path: Path) -> None:
    class Divides(WeightedTokens):
        def sample_divisor(self, token_ids: NDArray[Any], loss_mask: NDArray[Any]) -> Any:
            return "many"

    with pytest.raises(UsageError, match="sample_divisor returned a str; expected a number"):
        train(tiny.config(tmp_path / "run", batch={"max_steps": 1}), objective=Divides(2.0))


def plain_loss(config: Any, sample_ids: Any, store: TokenStore, even: float) -> float:
    """The weighted mean over samples, one forward pass of the plain model each."""
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float64)
    total = divisor = 0.0
    for sample_id in sample_ids:
        token_ids, loss_mask = (torch.from_numpy(np.array(part)) for part in store.sample(sample_id).pair)
        logits = model(token_ids[None].long()).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, token_ids[1:].long(), reduction="none")
        weights = torch.where(token_ids[1:] % 2 == 0, even, 1.0) * loss_mask[1:]
        total, divisor = total + float((losses * weights).sum().detach()), divisor + float(weights.sum())
    return total / divisor


def test_the_loss_is_the_weighted_mean_over_the_step_and_over_the_evaluation_set(
    tiny: Any, tmp_path: Path, metrics_of: Any
) -> None:
    eval_section = {"fraction": 0.1, "every_steps": 1}
    model = {"name": str(tiny.model_dir), "precision": "fp64"}
    batch = {"max_steps": 1, "micro_batch_tokens": 500}
    config = tiny.config(tmp_path / "run", model=model, batch=batch, eval=eval_section, optim={"lr": 1e-30})
    train(config, objective=WeightedTokens(3.0))
    planned = plan_run(config, Reporter(), Rank())
    step = planned.plan.step(0)
    assert len(step.ranks[0]) > 1
    expected = plain_loss(config, step.sample_ids, planned.store, 3.0)
    assert metrics_of(tmp_path / "run")[0]["loss"] == pytest.approx(expected, rel=1e-10)
    evaluated = plain_loss(config, planned.eval_sets[0].plan.sample_ids, planned.store, 3.0)
    assert metrics_of(tmp_path / "run", "eval")[0]["eval_loss"] == pytest.approx(evaluated, rel=1e-10)


def test_the_split_into_micro_batches_does_not_matter_and_weights_of_one_change_nothing(
    tiny: Any, tmp_path: Path, metrics_of: Any
) -> None:
    model = {"name": str(tiny.model_dir), "precision": "fp64"}

    def losses(name: str, objective: Any, micro_batch_tokens: int) -> list[float]:
        batch = {"max_steps": 3, "micro_batch_tokens": micro_batch_tokens}
        config = tiny.config(tmp_path / name, model=model, batch=batch)
        train(config, **({"objective": objective} if objective else {}))
        return [line["loss"] for line in metrics_of(tmp_path / name)]

    weighted = losses("whole", WeightedTokens(2.0), 4000)
    assert losses("split", WeightedTokens(2.0), 500) == pytest.approx(weighted, rel=1e-9)
    plain = losses("plain", None, 4000)
    assert losses("ones", WeightedTokens(1.0), 4000) == pytest.approx(plain, rel=1e-9)
    assert weighted != pytest.approx(plain, rel=1e-3)


def test_a_run_resumes_with_its_own_objective_only(tiny: Any, tmp_path: Path, metrics_of: Any) -> None:
    def run(name: str, max_steps: int, objective: Any = None) -> Any:
        batch = {"max_steps": max_steps, "micro_batch_tokens": 700}
        checkpoint = {"every_steps": 1, "allow_change": ["batch.max_steps"]}
        schedule = {"kind": "constant", "warmup_steps": 0}
        config = tiny.config(tmp_path / name, batch=batch, checkpoint=checkpoint, schedule=schedule)
        return train(config, **({"objective": objective} if objective else {}))

    run("whole", 4, WeightedTokens(2.0))
    run("run", 2, WeightedTokens(2.0))
    for other in (None, WeightedTokens(5.0)):
        with pytest.raises(CheckpointError, match=r"^the objective differs from the one .*allow_change=\[objective\]"):
            run("run", 4, other)
    run("run", 4, WeightedTokens(2.0))
    run("run", 4, WeightedTokens(2.0))  # it is complete, and says so
    assert [line["loss"] for line in metrics_of(tmp_path / "run")] == [
        line["loss"] for line in metrics_of(tmp_path / "whole")
    ]
    weights = [tmp_path / name / "final" / "model.safetensors" for name in ("run", "whole")]
    ours, whole = (path if path.exists() else path.with_name("adapter_model.safetensors") for path in weights)
    assert ours.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(("divisor", "message"), [(0.0, "0 for every sample"), (float("nan"), "nan; it must be")])
def test_a_divisor_that_cannot_be_is_refused_before_the_first_step(
    tiny: Any, tmp_path: Path, divisor: float, message: str
) -> None:
    objective = WeightedTokens(1.0)
    objective.sample_divisor = lambda token_ids, loss_mask: divisor  # type: ignore[method-assign]
    with pytest.raises(DataError, match=message):
        train(tiny.config(tmp_path / "run"), objective=objective)
