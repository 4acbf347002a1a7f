"""Losses over pairs as a person names them, against forms of their own in plain torch and transformers, in fp64."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM
from unit_store import write_units

from flatout.cli.main import main
from flatout.config.read import dump_config, make_config
from flatout.config.schema import Config
from flatout.data.token_store import TokenStore
from flatout.errors import DataError, ProblemsError
from flatout.objectives.orpo import ORPO
from flatout.objectives.preference import Answers
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.trainer.decide import plan_run

NUM_PAIRS, PER_STEP = 10, 5


def odds(mean: Tensor) -> Tensor:
    return torch.log(mean.exp() / (1 - mean.exp()))


# kind -> its settings, the loss of a pair, and an answer's reward; s log-probability, n tokens, d log-ratio
Form = tuple[dict[str, Any], Callable[..., Tensor], Callable[..., Tensor]]
FORMS: dict[str, Form] = {
    "orpo": (
        {"kind": "orpo", "beta": 0.3},
        lambda c, r: -c.s / c.n - 0.3 * logsigmoid(odds(c.s / c.n) - odds(r.s / r.n)),
        lambda x: 0.3 * x.s / x.n,
    ),
    "simpo": (
        {"kind": "simpo"},
        lambda c, r: -logsigmoid(2.0 * (c.s / c.n - r.s / r.n) - 1.0),
        lambda x: 2.0 * x.s / x.n,
    ),
    "simpo and SFT": (
        {"kind": "simpo", "beta": 2.5, "gamma": 0.5, "sft_weight": 0.7},
        lambda c, r: -logsigmoid(2.5 * (c.s / c.n - r.s / r.n) - 0.5) - 0.7 * c.s / c.n,
        lambda x: 2.5 * x.s / x.n,
    ),
    "cpo": (
        {"kind": "cpo", "beta": 0.05},
        lambda c, r: -logsigmoid(0.05 * (c.s - r.s)) - c.s / c.n,
        lambda x: 0.05 * x.s,
    ),
}
LAYOUTS: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "whole": ({"micro_batch_tokens": 4000, "share_prefix": "off"}, [], 1),
    "several": ({"micro_batch_tokens": 260, "share_prefix": "off"}, [], 3),
    "shared": ({"micro_batch_tokens": 4000}, [], 1),
    "shared, several": ({"micro_batch_tokens": 300}, [], 2),
    "rows": ({"micro_batch_tokens": 600, "layout": "rows"}, [], 2),
    "2 ranks": ({"micro_batch_tokens": 300}, ["gpus=[0,1]"], 2),
    "3 ranks": ({"micro_batch_tokens": 4000, "share_prefix": "off"}, ["gpus=[0,1,2]"], 3),
}
# every kind and every layout once; the product with -m exhaustive
WITH_THE_SUITE = dict(zip(FORMS, ["several", "shared", "rows", "whole", "2 ranks"], strict=False))
CASES = [
    pytest.param(kind, layout, marks=[] if WITH_THE_SUITE.get(kind) == layout else pytest.mark.exhaustive)
    for kind in FORMS
    for layout in LAYOUTS
]


@pytest.fixture(scope="module")
def pairs(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TokenStore]:
    root = tmp_path_factory.mktemp("pairs")
    return root, write_units(root, tiny.model_dir, [2] * NUM_PAIRS, name="pairs")


def config_of(tiny: Any, root: Path, folder: Path, *overrides: str, **sections: Any) -> Config:
    values = {
        "run_dir": str(folder),
        "device": "cpu",
        "method": "full",
        "model": {"name": str(tiny.model_dir), "precision": "fp64"},
        "data": {"name": "pairs", "root": str(root)},
        "optim": {"name": "sgd", "lr": 1.0, "beta1": 0.0, "max_grad_norm": None},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "eval": {"prompts": []},
        "checkpoint": {"every_steps": None},
        **sections,
    }
    values["batch"] = {"samples_per_step": PER_STEP, "max_steps": 1, **sections.get("batch", {})}
    return make_config(values, overrides)


class Answer:
    """One answer by a plain model: its log-probability s, its tokens n, and its log-ratio d to the model at step 0."""

    def __init__(self, model: Any, store: TokenStore, sample_id: int) -> None:
        ids, mask = (torch.tensor(part.tolist()) for part in store.sample(sample_id).pair)
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        self.s, self.n = logprobs[mask[1:]].sum(), int(mask[1:].sum())
        self.d = self.s - self.s.detach()


@pytest.fixture(scope="module")
def expected(tiny: Any, pairs: tuple[Path, TokenStore], tmp_path_factory: Any) -> Callable[[str], dict[str, Any]]:
    """Loss, figures and gradients of the first step by a kind's own form: the whole step at once, nothing packed."""
    root, store = pairs
    planned = plan_run(config_of(tiny, root, tmp_path_factory.mktemp("plan")), Reporter(), Rank())
    units = sorted({sample_id // 2 for sample_id in planned.plan.step(0).sample_ids})
    known: dict[str, dict[str, Any]] = {}

    def find(kind: str) -> dict[str, Any]:
        if kind in known:
            return known[kind]
        model = AutoModelForCausalLM.from_pretrained(tiny.model_dir, dtype=torch.float64)
        _, loss_of, reward_of = FORMS[kind]
        read = [[Answer(model, store, 2 * unit + place) for place in (0, 1)] for unit in units]
        loss = torch.stack([loss_of(*pair) for pair in read]).mean()
        loss.backward()
        rewards = torch.tensor([[reward_of(one).item() for one in pair] for pair in read])
        known[kind] = {
            "loss": loss.item(),
            "gradients": {name: own.grad for name, own in model.named_parameters()},
            "metrics": {
                "rewards/chosen": rewards[:, 0].mean().item(),
                "rewards/rejected": rewards[:, 1].mean().item(),
                "rewards/margins": (rewards[:, 0] - rewards[:, 1]).mean().item(),
                "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).double().mean().item(),
                "logps/chosen": sum(pair[0].s.item() for pair in read) / len(read),
                "logps/rejected": sum(pair[1].s.item() for pair in read) / len(read),
                "nll": sum(-pair[0].s.item() / pair[0].n for pair in read) / len(read),
            },
        }
        return known[kind]

    return find


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_loss_and_gradients_are_those_of_plain_torch(
    tiny: Any, pairs: Any, expected: Any, tmp_path: Path, metrics_of: Any, kind: str, layout: str
) -> None:
    batch, more, least = LAYOUTS[layout]
    config = config_of(tiny, pairs[0], tmp_path / "run", batch=batch, objective=FORMS[kind][0])
    (tmp_path / "run.yaml").write_text(dump_config(config, only_given=True))
    assert main(["train", str(tmp_path / "run.yaml"), *more]) == 0
    (line,), plain = metrics_of(tmp_path / "run"), expected(kind)
    assert line["num_micro_batches"] >= least
    assert (line["shared_share"] > 0.1) == ("share_prefix" not in batch and "layout" not in batch)
    # rotary cosines are computed in fp32
    assert line["loss"] == pytest.approx(plain["loss"], rel=1e-7)
    assert line["metrics"] == pytest.approx(plain["metrics"], rel=1e-6, abs=1e-6)
    before, after = load_file(tiny.model_dir / "model.safetensors"), load_file(tmp_path / "run/final/model.safetensors")
    gradients = {name: own for name, own in plain["gradients"].items() if name in before}
    largest = max(float(own.norm()) for own in gradients.values())
    for name, gradient in gradients.items():
        assert float((before[name].double() - after[name] - gradient).norm()) < 1e-6 * largest, name


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ({"kind": "simpo", "beta": 2.5}, None),
        ({"kind": "simpo", "beta": 0}, "objective.beta: input should be greater than 0, got 0"),
        ({"kind": "orpo", "gamma": 1.0}, "objective.gamma: orpo has no such field; its fields are sft_weight, beta"),
        ({"kind": "sipmo"}, "did you mean simpo?"),
    ],
)
def test_fields_are_those_of_the_kind(tiny: Any, tmp_path: Path, objective: Any, said: str | None) -> None:
    if said is None:
        assert config_of(tiny, tmp_path, tmp_path / "run", objective=objective).objective.fields == {"beta": 2.5}
        return
    with pytest.raises(ProblemsError, match=re.escape(said)):
        config_of(tiny, tmp_path, tmp_path / "run", objective=objective)


@pytest.mark.parametrize(
    ("method", "kind", "lr"),
    [("full", "simpo", 1e-6), ("lora", "simpo", 1e-5), ("lora", "orpo", 5e-5), ("lora", "cross_entropy", 2e-4)],
)
def test_the_learning_rate_follows_the_kind(tiny: Any, tmp_path: Path, method: str, kind: str, lr: float) -> None:
    for given in (kind, {"kind": kind}):
        auto = config_of(tiny, tmp_path, tmp_path / "run", method=method, objective=given, optim={"lr": "auto"})
        assert auto.optim.lr == lr
    own = config_of(tiny, tmp_path, tmp_path / "run", method=method, objective=kind, optim={"lr": 3e-4})
    assert own.optim.lr == 3e-4


@pytest.mark.parametrize(
    ("sizes", "said"), [([2] * 4, None), ([1] * 8, "a unit of 1, but objective simpo takes units of 2; 8 of 8 units")]
)
def test_only_pairs_are_trained_on(tiny: Any, tmp_path: Path, sizes: list[int], said: str | None) -> None:
    write_units(tmp_path, tiny.model_dir, sizes, name="pairs")
    config = config_of(tiny, tmp_path, tmp_path / "run", objective="simpo")
    if said is None:
        assert plan_run(config, Reporter(), Rank()).plan.num_units == 4
        return
    with pytest.raises(DataError, match=said):
        plan_run(config, Reporter(), Rank())


def test_an_answer_without_a_label_token_is_named(tiny: Any, tmp_path: Path) -> None:
    store = write_units(tmp_path, tiny.model_dir, [2] * 4, name="pairs", unlabelled=5)
    with pytest.raises(DataError, match="sample 5 has no label token, so objective simpo has nothing of"):
        plan_run(config_of(tiny, tmp_path, tmp_path / "run", objective="simpo"), Reporter(), Rank())
    assert store.num_labels[5] == 0


def test_odds_of_certainty_are_finite() -> None:
    logprob = torch.tensor([0.0, -1e-9, -0.5, -200.0], requires_grad=True)
    answers = Answers(logprob, torch.full((4,), 2))
    losses = ORPO().losses(answers, Answers(logprob.flip(0), torch.full((4,), 2)))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logprob.grad is not None
    assert logprob.grad.isfinite().all()
