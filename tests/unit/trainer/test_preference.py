"""Losses over answers as a person names them: whole runs against plain torch, their settings, what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_losses import KTO, SETTINGS, PlainStep
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from unit_store import write_units

from flatout.cli.main import main
from flatout.config.read import dump_config, make_config
from flatout.config.schema import Config
from flatout.errors import DataError
from flatout.objectives.preference import ORPO, Answers
from flatout.parallel.rank import Rank
from flatout.track.callback import MemoryCallback, Reporter
from flatout.trainer.planned_run import PlannedRun, open_and_plan

NUM_UNITS, PER_STEP, LR = 10, 5, 0.5


LAYOUTS: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "shared, several": ({"micro_batch_tokens": 300}, [], 2),
    "several": ({"micro_batch_tokens": 100, "share_prefix": "off"}, [], 2),
    "2 ranks": ({"micro_batch_tokens": 300}, ["gpus=[0,1]"], 2),
}
CASES: list[Any] = [
    pytest.param("dpo", "2 ranks", marks=pytest.mark.exhaustive),
    ("dpo_norm", "shared, several"),
    ("kto, weighted", "several"),
]


@pytest.fixture(scope="module")
def root(tiny, tmp_path_factory):
    """The root of a data set of pairs, and of one of labelled answers."""
    folder = tmp_path_factory.mktemp("pairs")
    write_units(folder, tiny.model_dir, [2] * NUM_UNITS, name="pairs")
    write_units(folder, tiny.model_dir, [1] * NUM_UNITS, name="labelled", labels=[1, 0, 1, 1, 0] * 2)
    return folder


def config_of(tiny: Any, root: Path, folder: Path, *overrides: str, **sections: Any) -> Config:
    values = {
        "run_dir": str(folder),
        "device": "cpu",
        "method": "full",
        "model": {"name": str(tiny.model_dir), "precision": "fp64"},
        "data": {"name": "pairs", "root": str(root)},
        "optim": {"name": "sgd", "lr": LR, "beta1": 0.0, "max_grad_norm": None},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "eval": {"prompts": []},
        "checkpoint": {"every_steps": None},
        **sections,
    }
    values["batch"] = {"samples_per_step": PER_STEP, "max_steps": 2, **sections.get("batch", {})}
    return make_config(values, overrides)


def plain_run(tiny: Any, planned: PlannedRun, name: str) -> tuple[list[float], dict[str, float], dict[str, Tensor]]:
    """Two steps by a loss's own form, nothing packed: losses, the last metrics, and the change of the weights.

    The reference is the model before the first one, of the samples of both.
    """
    store, count = planned.store, planned.store.num_samples
    others = planned.kl_pairs.store.answer_of.tolist() if planned.kl_pairs else []
    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir, dtype=torch.float64)
    before = {name: own.detach().clone() for name, own in model.named_parameters()}
    zeros, losses, metrics = [0.0] * count, [], {}
    with torch.no_grad():
        first = PlainStep(tiny.model_dir, store, range(count), zeros, others, zeros, model)
        reference = [one.s.item() for one in first.answers]
        of_others = [first.other(sample_id).s.item() for sample_id in range(count)] if others else []
    for step in planned.plan.steps():
        own = PlainStep(tiny.model_dir, store, step.sample_ids, reference, others, of_others, model)
        loss, gradients, metrics = own.gradients(name)
        losses.append(loss)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                parameter -= LR * gradients[parameter_name]
    return losses, metrics, {name: own.detach() - before[name] for name, own in model.named_parameters()}


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_two_steps_of_a_run_are_those_of_plain_torch(tiny, root, tmp_path, metrics_of, kind, layout):
    """By the command, with the reference that the run computes; tests/unit/trainer/test_losses.py has every loss."""
    batch, more, least = LAYOUTS[layout]
    data = {"name": "labelled" if kind in KTO else "pairs", "root": str(root)}
    config = config_of(tiny, root, tmp_path / "run", batch=batch, objective=SETTINGS[kind], data=data)
    (tmp_path / "run.yaml").write_text(dump_config(config, only_given=True))
    assert main(["train", str(tmp_path / "run.yaml"), *more]) == 0
    lines = metrics_of(tmp_path / "run")
    losses, metrics, changes = plain_run(tiny, open_and_plan(config, Reporter(), Rank()), kind)
    assert lines[-1]["num_micro_batches"] >= least
    assert (lines[-1]["shared_share"] > 0.1) == ("share_prefix" not in batch)
    # rotary cosines are computed in fp32
    assert [one["loss"] for one in lines] == pytest.approx(losses, rel=1e-7)
    assert lines[-1]["metrics"] == pytest.approx(metrics, rel=1e-6, abs=1e-6)
    before, after = load_file(tiny.model_dir / "model.safetensors"), load_file(tmp_path / "run/final/model.safetensors")
    largest = max(float(change.norm()) for change in changes.values())
    for name, own in before.items():
        assert float((after[name] - own.double() - changes[name]).norm()) < 1e-6 * largest, name


@pytest.mark.parametrize(
    ("method", "kind", "lr"),
    [("full", "simpo", 1e-6), ("lora", "simpo", 1e-5), ("lora", "orpo", 5e-5), ("lora", "cross_entropy", 2e-4)],
)
def test_the_learning_rate_follows_the_kind(tiny, tmp_path, method, kind, lr):
    for given in (kind, {"kind": kind}):
        auto = config_of(tiny, tmp_path, tmp_path / "run", method=method, objective=given, optim={"lr": "auto"})
        assert auto.optim.lr == lr
    own = config_of(tiny, tmp_path, tmp_path / "run", method=method, objective=kind, optim={"lr": 3e-4})
    assert own.optim.lr == 3e-4


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([2] * 4, None),
        ([1] * 8, "objective simpo needs a chosen and a rejected answer in each row; 8 of 8"),
        ([2, 1, 3] * 4, "objective simpo .* 8 of 12"),
    ],
)
def test_only_pairs_are_trained_on(tiny, tmp_path, sizes, said):
    write_units(tmp_path, tiny.model_dir, sizes, name="pairs")
    config = config_of(tiny, tmp_path, tmp_path / "run", objective="simpo")
    if said is None:
        assert open_and_plan(config, Reporter(), Rank()).plan.num_units == 4
        for lr, is_told in (("auto", False), (2e-4, True)):
            recorder = MemoryCallback()
            config = config_of(tiny, tmp_path, tmp_path / "run", objective="simpo", optim={"lr": lr})
            open_and_plan(config, Reporter(recorder), Rank())
            assert ("optim.lr 0.0002 is 200 times the usual 1e-06" in str(recorder.events)) == is_told
        return
    with pytest.raises(DataError, match=said):
        open_and_plan(config, Reporter(), Rank())


def test_an_answer_without_a_label_token_is_named(tiny, tmp_path):
    store = write_units(tmp_path, tiny.model_dir, [2] * 4, name="pairs", unlabelled=5)
    with pytest.raises(DataError, match="sample 5 has no label token, so objective simpo has nothing of"):
        open_and_plan(config_of(tiny, tmp_path, tmp_path / "run", objective="simpo"), Reporter(), Rank())
    assert store.num_label_tokens[5] == 0


def test_odds_of_certainty_are_finite():
    logprob = torch.tensor([0.0, -1e-9, -0.5, -200.0], requires_grad=True)
    answers = Answers(logprob, torch.full((4,), 2), None)
    losses = ORPO().losses(answers, Answers(logprob.flip(0), torch.full((4,), 2), None))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logprob.grad is not None
    assert logprob.grad.isfinite().all()
