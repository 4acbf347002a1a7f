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
from flatout.track.callback import MemoryCallback, Reporter
from flatout.trainer.decide import plan_run

NUM_PAIRS, PER_STEP, LR = 10, 5, 0.5


def odds(mean: Tensor) -> Tensor:
    return torch.log(mean.exp() / (1 - mean.exp()))


# kind -> its settings, the loss of a pair, and an answer's reward; s log-probability, n tokens, d log-ratio
Form = tuple[dict[str, Any], Callable[..., Tensor], Callable[..., Tensor]]
FORMS: dict[str, Form] = {
    "dpo": (
        {"kind": "dpo"},
        lambda c, r: -logsigmoid(0.1 * (c.d - r.d)),
        lambda x: 0.1 * x.d,
    ),
    "dpo, smoothed": (
        {"kind": "dpo", "beta": 0.5, "label_smoothing": 0.2},
        lambda c, r: -0.8 * logsigmoid(0.5 * (c.d - r.d)) - 0.2 * logsigmoid(0.5 * (r.d - c.d)),
        lambda x: 0.5 * x.d,
    ),
    "dpo, robust": (
        {"kind": "dpo", "beta": 0.5, "label_smoothing": 0.2, "robust": True, "sft_weight": 0.1},
        lambda c, r: (
            (-0.8 * logsigmoid(0.5 * (c.d - r.d)) + 0.2 * logsigmoid(0.5 * (r.d - c.d))) / 0.6 - 0.1 * c.s / c.n
        ),
        lambda x: 0.5 * x.d,
    ),
    "ipo": (
        {"kind": "ipo", "beta": 0.2},
        lambda c, r: (c.d / c.n - r.d / r.n - 1 / 0.4) ** 2,
        lambda x: 0.2 * x.d,
    ),
    "dpo_norm": (
        {"kind": "dpo_norm"},
        lambda c, r: -logsigmoid(5.0 * (c.d / c.n - r.d / r.n)),
        lambda x: 5.0 * x.d / x.n,
    ),
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
WITH_THE_SUITE = dict(
    zip(
        FORMS,
        ["2 ranks", "several", "rows", "shared", "whole", "several", "shared", "rows", "shared, several"],
        strict=False,
    )
)
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
        "optim": {"name": "sgd", "lr": LR, "beta1": 0.0, "max_grad_norm": None},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "eval": {"prompts": []},
        "checkpoint": {"every_steps": None},
        **sections,
    }
    values["batch"] = {"samples_per_step": PER_STEP, "max_steps": 2, **sections.get("batch", {})}
    return make_config(values, overrides)


class Answer:
    """One answer by a plain model: its log-probability s, its tokens n, and its log-ratio d to the reference."""

    def __init__(self, model: Any, store: TokenStore, sample_id: int, reference: dict[int, float]) -> None:
        ids, mask = (torch.tensor(part.tolist()) for part in store.sample(sample_id).pair)
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        self.s, self.n = logprobs[mask[1:]].sum(), int(mask[1:].sum())
        self.d = self.s - reference.setdefault(sample_id, self.s.item())


@pytest.fixture(scope="module")
def expected(tiny: Any, pairs: tuple[Path, TokenStore], tmp_path_factory: Any) -> Callable[[str], dict[str, Any]]:
    """Two steps by a kind's own form, nothing packed: losses, the last metrics, and the weights after them.

    The first step has all references still to find, as both steps together are an epoch.
    """
    root, store = pairs
    plan = plan_run(config_of(tiny, root, tmp_path_factory.mktemp("plan")), Reporter(), Rank()).plan
    known: dict[str, dict[str, Any]] = {}

    def find(kind: str) -> dict[str, Any]:
        if kind in known:
            return known[kind]
        model = AutoModelForCausalLM.from_pretrained(tiny.model_dir, dtype=torch.float64)
        _, loss_of, reward_of = FORMS[kind]
        reference: dict[int, float] = {}
        with torch.no_grad():
            for sample_id in range(2 * NUM_PAIRS):
                Answer(model, store, sample_id, reference)
        losses = []
        for step in plan.steps():
            units = sorted({sample_id // 2 for sample_id in step.sample_ids})
            read = [[Answer(model, store, 2 * unit + place, reference) for place in (0, 1)] for unit in units]
            loss = torch.stack([loss_of(*pair) for pair in read]).mean()
            model.zero_grad()
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= LR * parameter.grad
        rewards = torch.tensor([[reward_of(one).item() for one in pair] for pair in read])
        known[kind] = {
            "losses": losses,
            "weights": {name: own.detach() for name, own in model.named_parameters()},
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
    lines, plain = metrics_of(tmp_path / "run"), expected(kind)
    line = lines[-1]
    assert line["num_micro_batches"] >= least
    assert (line["shared_share"] > 0.1) == ("share_prefix" not in batch and "layout" not in batch)
    # rotary cosines are computed in fp32
    assert [one["loss"] for one in lines] == pytest.approx(plain["losses"], rel=1e-7)
    assert line["metrics"] == pytest.approx(plain["metrics"], rel=1e-6, abs=1e-6)
    before, after = load_file(tiny.model_dir / "model.safetensors"), load_file(tmp_path / "run/final/model.safetensors")
    changes = {name: (plain["weights"][name] - own.double()) for name, own in before.items()}
    largest = max(float(change.norm()) for change in changes.values())
    for name, change in changes.items():
        assert float((after[name] - before[name].double() - change).norm()) < 1e-6 * largest, name


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
        for lr, is_told in (("auto", False), (2e-4, True)):
            recorder = MemoryCallback()
            config = config_of(tiny, tmp_path, tmp_path / "run", objective="simpo", optim={"lr": lr})
            plan_run(config, Reporter(recorder), Rank())
            assert ("optim.lr 0.0002 is 200 times the usual 1e-06" in str(recorder.stages)) == is_told
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
    answers = Answers(logprob, torch.full((4,), 2), None)
    losses = ORPO().losses(answers, Answers(logprob.flip(0), torch.full((4,), 2), None))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logprob.grad is not None
    assert logprob.grad.isfinite().all()
