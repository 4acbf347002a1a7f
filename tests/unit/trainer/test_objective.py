"""Objectives as settings: weighted tokens and a person's own file, against the same sums in plain transformers."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import flatout
from flatout import Answers, Preference
from flatout.cli.main import main
from flatout.config.read import dump_config, make_config
from flatout.data.add_column import add_column
from flatout.data.token_store import TokenStore
from flatout.errors import CheckpointError, DataError, NumericError, ProblemsError, UsageError
from flatout.objectives.loss_inputs import LossInputs
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.track.run_log import read_run
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.run import train
from tests.usual import every, usual

FOCAL = '''
from __future__ import annotations
import torch
from pydantic import Field
from flatout import Metric, LabelTokens, Objective

class Focal(Objective):
    """(1 - p) ** gamma times the cross-entropy of each label token."""
    metrics = {"certainty": Metric("higher"), "surprise": Metric("lower")}
    gamma: float = Field(default=2.0, ge=0)

    def __call__(self, tokens: LabelTokens) -> dict[str, torch.Tensor]:
        p = tokens.logprobs.exp()
        loss = -((1 - p) ** self.gamma * tokens.logprobs).sum()
        return {"loss": loss, "certainty": p.sum(), "surprise": (1 - p).sum()}
'''


TEMPERED = '''
from flatout import LabelTokens, Metric, Objective

class Tempered(Objective):
    """Cross-entropy at a temperature less a part of the entropy."""
    metrics = {"entropy": Metric("lower"), "right": Metric(per="labels")}

    def __call__(self, tokens: LabelTokens):
        entropy = tokens.entropy_at(0.7)
        loss = -tokens.logprobs_at(0.7).sum() - 0.1 * tokens.entropy_at(0.7, with_graph=True).sum()
        return {"loss": loss - 0.01 * tokens.logprobs.square().sum(), "entropy": entropy.sum(),
                "right": tokens.is_correct.sum()}
'''


def test_verify_proves_a_loss_at_a_temperature_with_entropy(tiny, tmp_path):
    (tmp_path / "own.py").write_text(TEMPERED)
    config = tiny.config(tmp_path / "run", objective={"path": f"{tmp_path / 'own.py'}:Tempered"})
    (tmp_path / "run.yaml").write_text(dump_config(config, only_given=True))
    assert main(["verify", str(tmp_path / "run.yaml"), "--ranks", "1"]) == 0
    rows = json.loads((tmp_path / "run" / "verify.json").read_text())["rows"]
    assert {row["case"] for row in rows if row["verdict"] == "ok"} >= {"packed", "each sample alone"}


LARGEST = '''
from flatout import Metric, Objective

class Largest(Objective):
    """Cross-entropy, with the largest and the least loss of a token."""
    metrics = {"largest": Metric("lower", reduce="max"), "mean": Metric(), "least": Metric(reduce="max"),
               "gap": Metric(difference=("largest", "mean"))}

    def __call__(self, tokens):
        losses = -tokens.logprobs
        return {"largest": losses.max(), "least": -losses.min(), "mean": losses.sum(), "loss": losses.sum()}
'''


@pytest.mark.parametrize("ranks", [[2], pytest.param([3], marks=pytest.mark.exhaustive)])
def test_a_maximum_is_that_of_all_micro_batches_ranks_and_sets(tiny, tmp_path, metrics_of, ranks):
    (tmp_path / "own.py").write_text(LARGEST)
    train_of = {"one pass": {"micro_batch_tokens": 4000}, "passes": {"micro_batch_tokens": 500}}
    train_of |= {f"{world} ranks": {"micro_batch_tokens": 500} for world in ranks}
    found = {}
    for name, batch in train_of.items():
        world = int(name[0]) if "ranks" in name else 1
        config = tiny.config(
            tmp_path / name,
            model={"name": str(tiny.model_dir), "precision": "fp64"},
            objective={"path": f"{tmp_path / 'own.py'}:Largest"},
            batch={"max_steps": 2, "samples_per_step": 7, **batch},
            optim={"lr": 1e-30},
            eval={"fraction": 0.1, "best": "largest", "prompts": []},
            **({"gpus": [*range(world)]} if world > 1 else {}),
        )
        (tmp_path / "run.yaml").write_text(dump_config(config, only_given=True))
        assert main(["train", str(tmp_path / "run.yaml")]) == 0
        found[name] = [one["metrics"] for kind in ("step", "eval") for one in metrics_of(config.folder, kind)]
    planned = open_and_plan(config, Reporter(), Rank())
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float64)
    samples = [(planned.store, planned.plan.step(step).sample_ids) for step in (0, 1)]
    samples += [(planned.eval_sets[0].store, planned.eval_sets[0].step.sample_ids)] * 2
    for place, (store, sample_ids) in enumerate(samples):
        losses = np.concatenate([token_losses(model, *store.sample(one).pair) for one in sample_ids])
        values = {"largest": losses.max(), "least": -losses.min(), "mean": losses.mean()}
        values["gap"] = values["largest"] - values["mean"]
        for name, metrics in found.items():
            assert metrics[place] == pytest.approx(values, rel=1e-6), name


@torch.no_grad()
def token_losses(model: Any, token_ids: Any, loss_mask: Any) -> Any:
    """The losses of a sample's label tokens, by the plain model."""
    ids, mask = (torch.from_numpy(np.array(part)) for part in (token_ids, loss_mask))
    logits = model(ids[None].long()).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[1:].long(), reduction="none")[mask[1:].bool()].numpy()


@pytest.fixture
def focal(tmp_path):
    """FILE.py:CLASS of a person's own loss."""
    (tmp_path / "own.py").write_text(FOCAL)
    return f"{tmp_path / 'own.py'}:Focal"


@pytest.fixture(scope="module")
def weighted(tiny, tmp_path_factory):
    """The root of a data set whose tokens have weights: 3 for even ids, 1 for others."""
    root = tmp_path_factory.mktemp("weighted")
    built = open_and_plan(tiny.config(root / "run"), Reporter(), Rank()).store.folder
    shutil.copytree(tiny.root / "data", root / "data")
    store = TokenStore.open(root / "data" / built.relative_to(tiny.root / "data"))
    weights = np.where(np.asarray(store.token_ids) % 2 == 0, 3.0, 1.0).astype(np.float32)
    add_column(store.folder, "weight", weights, per="token", meaning="how much a token counts")
    return root / "data", store


def plain_loss(config: Any, sample_ids: Any, store: TokenStore, even: float) -> float:
    """The weighted mean over samples, one forward pass of the plain model each."""
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float64)
    total = normalizer = 0.0
    for sample_id in sample_ids:
        token_ids, loss_mask = (torch.from_numpy(np.array(part)) for part in store.sample(sample_id).pair)
        logits = model(token_ids[None].long()).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, token_ids[1:].long(), reduction="none")
        weights = torch.where(token_ids[1:] % 2 == 0, even, 1.0) * loss_mask[1:]
        total, normalizer = total + float((losses * weights).sum().detach()), normalizer + float(weights.sum())
    return total / normalizer


def test_the_loss_is_the_weighted_mean_over_the_step_and_over_the_evaluation_set(tiny, weighted, tmp_path, metrics_of):
    sections: dict[str, Any] = {
        "model": {"name": str(tiny.model_dir), "precision": "fp64"},
        "data": {"root": str(weighted[0])},
        "eval": {"fraction": 0.1, "every_steps": 1},
        "optim": {"lr": 1e-30},
        "objective": "weighted_tokens",
    }
    found = []
    for tokens in (500, 4000):
        batch = {"max_steps": 1, "micro_batch_tokens": tokens}
        config = tiny.config(tmp_path / f"run-{tokens}", batch=batch, **sections)
        train(config)
        found.append(metrics_of(config.folder)[0])
    planned = open_and_plan(config, Reporter(), Rank())
    step = planned.plan.step(0)
    assert found[0]["num_micro_batches"] > found[1]["num_micro_batches"] == 1
    expected = plain_loss(config, step.sample_ids, planned.store, 3.0)
    assert [line["loss"] for line in found] == pytest.approx([expected] * 2, rel=1e-10)
    assert found[0]["token_accuracy"] == found[1]["token_accuracy"]
    evaluated = plain_loss(config, planned.eval_sets[0].step.sample_ids, planned.store, 3.0)
    assert metrics_of(config.folder, "eval")[0]["eval_loss"] == pytest.approx(evaluated, rel=1e-10)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (lambda ones: ones, None),
        (lambda ones: -ones, "column weight adds -.*give values of at least 0"),
        (lambda ones: 0 * ones, "weight is 0 for every sample"),
    ],
)
def test_weights_that_cannot_be_are_refused_before_the_first_step_and_ones_change_nothing(
    tiny, weighted, tmp_path, metrics_of, values, said
):
    shutil.copytree(weighted[0], tmp_path / "data")
    ones = np.ones(len(weighted[1].token_ids), np.float32)
    add_column(
        tmp_path / "data" / weighted[1].folder.relative_to(weighted[0]),
        "weight",
        values(ones),
        per="token",
        meaning="a",
    )
    sections: dict[str, Any] = {"data": {"root": str(tmp_path / "data")}, "batch": {"max_steps": 2}}
    config = tiny.config(tmp_path / "run", objective={"kind": "weighted_tokens"}, **sections)
    if said is not None:
        with pytest.raises(DataError, match=said):
            train(config)
        return
    train(config)
    train(tiny.config(tmp_path / "plain", **sections))
    losses = [[line["loss"] for line in metrics_of(tmp_path / name)] for name in ("run", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_loss_of_ones_own_runs_from_the_command_line_and_its_figures_are_shown(
    tiny, tmp_path, focal, capsys, metrics_of
):
    config = tiny.config(tmp_path / "run", batch={"max_steps": 2}, eval={"fraction": 0.1})
    (tmp_path / "run.yaml").write_text(dump_config(config, only_given=True))
    assert main(["train", str(tmp_path / "run.yaml"), f"objective.path={focal}", "objective.gamma=0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "objective Focal (gamma 0.0), per label token" in said
    assert "own.py:Focal runs as code" in said
    # with gamma 0 it is cross-entropy
    train(tiny.config(tmp_path / "plain", batch={"max_steps": 2}, eval={"fraction": 0.1}))
    ours, plain = metrics_of(tmp_path / "run"), metrics_of(tmp_path / "plain")
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in plain], rel=1e-6)
    assert [line["token_accuracy"] for line in ours] == [None, None]
    for line in (*ours, *metrics_of(tmp_path / "run", "eval")):
        assert sum(line["metrics"].values()) == pytest.approx(1.0, rel=1e-6)
    assert "certainty" in (tmp_path / "run" / "train.log").read_text()
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert "certainty" in (tmp_path / "page.html").read_text()
    assert read_run(tmp_path / "run").steps[-1].metrics.keys() == {"certainty", "surprise"}


def test_best_is_judged_by_the_named_figure(tiny, tmp_path, focal, metrics_of):
    sections: dict[str, Any] = {"batch": {"max_steps": 4}, "optim": {"lr": 3e-2}, "objective": {"path": focal}}
    for best, sign in (("surprise", 1), ("certainty", -1)):
        config = tiny.config(tmp_path / best, eval={"fraction": 0.1, "every_steps": 1, "best": best}, **sections)
        progress = train(config).progress
        found = [(one["metrics"][best], one["step"]) for one in metrics_of(config.folder, "eval")]
        assert (progress.best_figure, progress.best_step) == min(found, key=lambda pair: sign * pair[0])
    with pytest.raises(UsageError, match=r"eval.best: 'accuracy' is not a metric of Focal; it has loss, cert"):
        train(tiny.config(tmp_path / "other", eval={"fraction": 0.1, "best": "accuracy"}, **sections))


WRONG_RETURNS = [
    ("return {'loss': l, 'certainty': l, 'surprise': l}", None),
    ("return {'loss': l}", "objective Focal returned loss; expected"),
    ("return tokens.logits", r"own.py:\d+: objective Focal failed with AttributeError"),
    ("return l", "objective Focal returned a Tensor; expected a mapping of loss, certainty, surprise"),
    ("return {'loss': l[None], 'certainty': l, 'surprise': l}", r"returned loss of shape \(1,\); expected"),
    ("l = l.detach(); return {'loss': l, 'certainty': l, 'surprise': l}", "returned a loss without a gradient"),
    ("self.calls = 1", r"own.py:\d+: .* with ValidationError: objective.calls: cannot be set by the loss"),
    ("return {'loss': l, 'certainty': l, 'surprise': l, 'p': l}", r"name others in `metrics`: 'p': Metric\(\)"),
    ("return tokens.by_sample(tokens.logprobs)", "sums over each sample, but its scope is 'token'"),
]


@pytest.mark.parametrize(("body", "said"), usual(WRONG_RETURNS, WRONG_RETURNS[::2]))
def test_a_wrong_return_is_one_sentence(tiny, tmp_path, focal, body, said):
    head = FOCAL.partition("        p = ")[0]
    (tmp_path / "own.py").write_text(f"{head}        l = -tokens.logprobs.sum()\n        {body}\n")
    config = tiny.config(tmp_path / "run", batch={"max_steps": 1}, objective={"path": focal})
    if said is None:
        train(config)
        return
    with pytest.raises(UsageError, match=said):
        train(config)


@pytest.mark.parametrize(
    ("value", "best"), [("p.sum()", "certainty"), ("p.sum() / 0", "loss"), ("p.sum() / 0", "certainty")]
)
def test_a_metric_that_is_not_a_number_is_told_and_only_ends_what_is_judged_by_it(
    tiny, tmp_path, focal, metrics_of, value, best
):
    (tmp_path / "own.py").write_text(FOCAL.replace('"certainty": p.sum()', f'"certainty": {value}'))
    sections = {"batch": {"max_steps": 3}, "eval": {"fraction": 0.1, "best": best}}
    config = tiny.config(tmp_path / "run", objective={"path": focal}, **sections)
    events = config.folder / "events.jsonl"
    is_number = "/ 0" not in value
    if not is_number and best != "loss":
        with pytest.raises(NumericError, match=r"step 0: eval.best: certainty is no finite number.*\n.*eval.best=loss"):
            train(config)
        return
    train(config)
    for kind in ("step", "eval"):
        assert {frozenset(one["metrics"]) for one in metrics_of(config.folder, kind)} == {
            frozenset({"certainty", "surprise"} if is_number else {"surprise"})
        }
    told = [one for line in events.read_text().splitlines() if (one := json.loads(line))["kind"] == "metric"]
    assert len(told) == (not is_number)
    assert read_run(config.folder).steps[-1].metrics["surprise"] > 0


def test_an_objective_says_what_it_lacks():
    inputs: Any = LossInputs(SimpleNamespace(columns={"label": torch.ones(2)}))  # type: ignore[arg-type]
    assert inputs.column("label").sum() == 2
    with pytest.raises(UsageError, match="reads the column 'weight', which its `columns` do not list"):
        inputs.column("weight")
    answers, other = (Answers(torch.tensor([-s]), torch.tensor([2.0]), torch.tensor([-3.0])) for s in (1.0, 4.0))
    assert (answers.ratio.item(), other.ratio.item()) == (2.0, -1.0)
    with pytest.raises(ValueError, match="`ratio` needs the reference; set columns = "):
        _ = answers._replace(reference=None).ratio
    for part in ("losses", "rewards"):
        with pytest.raises(NotImplementedError, match=f"Preference has no {part}"):
            getattr(Preference(), part)(*[answers, other][: 2 if part == "losses" else 1])


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("losses", lambda values: values, None),
        ("losses", lambda values: values.mean(), r"losses returned a tensor of shape \(\); expected \(3,\), one"),
        ("losses", lambda values: {"loss": values.sum()}, "losses returned a dict; expected"),
        ("rewards", lambda values: values[:, None], r"rewards returned a tensor of shape \(3, 1\); expected"),
        ("rewards", lambda values: values.mean(), r"rewards returned a tensor of shape \(\); expected"),
        ("rewards", lambda values: None, "rewards returned a NoneType; expected"),
    ],
)
def test_losses_and_rewards_have_a_value_for_each_pair(part, change, said):
    class Own(Preference):
        def losses(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
            return rejected.mean - chosen.mean

        def rewards(self, answers: Answers) -> torch.Tensor:
            return answers.mean

    plain = getattr(Own, part)
    setattr(Own, part, lambda self, *answers: change(plain(self, *answers)))
    tokens: Any = SimpleNamespace(
        by_sample=lambda values: values, by_unit=lambda values: values.view(3, 2), logprobs=-torch.arange(1.0, 7.0),
        sample_lengths=torch.ones(6),
    )  # fmt: skip
    if said is None:
        assert {"loss": -3.0, "rewards/accuracies": 3.0}.items() <= {
            name: value.item() for name, value in Own()(tokens).items()
        }.items()
        return
    with pytest.raises(UsageError, match=said):
        Own()(tokens)


# what is changed in the file, and what is said
UNUSABLE: list[Any] = [
    (("", ""), None),
    (("Focal(Objective)", "Other(Objective)"), "own.py:Focal: has no such class; define class Focal"),
    (("Focal(Objective)", "Focal"), "it is not a subclass of flatout.Objective"),
    (("import torch", "import torch, beside_it"), None),
    (
        ("    gamma: float", "    def __init__(self, **own): super().__init__(**own)\n    gamma: float"),
        "own.py:Focal: it has an __init__; write settings as fields instead",
    ),
    (("import torch", "import torch, nothing_like_it"), r"own.py:3: the objective's own code failed with Module"),
    (("    metrics", "    normalizer = 'weight'\n    metrics"), "normalizer is 'weight'; expected one of labels"),
    (("    metrics", "    scope = 'unit'\n    metrics"), "unit_size is None; expected the number of samples"),
    (('Metric("higher")', "Metric('max')"), r"better is 'max'; expected higher or lower"),
    (('Metric("higher")', "Metric(reduce='max')"), None),
    (('Metric("higher")', "Metric(reduce='mean')"), r"\['certainty'\].reduce is 'mean'; expected sum or max"),
    (('Metric("higher")', "Metric(per='labels', reduce='max')"), r"\['certainty'\] is 'labels'; expected neither per"),
    *(
        (("    gamma: float", f"    {declared}\n    gamma: float"), said)
        for declared, said in {
            "metrics = None": "metrics is None; expected a mapping",
            "metrics = {'acc': 'higher'}": r"metrics\['acc'\] is 'higher'; expected a flatout.Metric",
            "metrics = {'acc': Metric(per=['labels'])}": r"metrics\['acc'\].per is \['labels'\]; expected one of",
            "metrics = {'a': Metric(), 'b': Metric(difference=('a', 'c'))}": r"\['b'\].difference is \('a', 'c'\)",
            "metrics = {'loss': Metric()}": "metrics is 'loss'; expected the other sums only",
            "columns = 'weight'": "columns is 'weight'; expected a tuple of names",
            "estimates = ['kl']": r"estimates is \['kl'\]; expected a tuple of names, such as \('kl',\)",
            "name = None": "name is None; expected a text",
            "reads = 'scores'": "scope is 'token'; expected sample or unit, as reads is 'scores'",
            "reads = 'states'": "reads is 'states'; expected labels or scores",
        }.items()
    ),
    (
        ("    gamma: float", "    name = 'mine'; metrics = {'certainty': Metric(per='samples')}\n    gamma: float"),
        None,
    ),
    (("    gamma: float", "    gama: float"), r"objective.gamma: Focal has no such field; did you mean gama\?"),
    (("    gamma: float", "    gamma: bool"), "objective.gamma: input should be a valid boolean, got 2.5"),
]


@pytest.mark.parametrize(("change", "said"), every(4, UNUSABLE))
def test_a_file_that_cannot_be_used_is_one_sentence(tiny, tmp_path, focal, change, said):
    (tmp_path / "own.py").write_text(FOCAL.replace(*change, 1))
    (tmp_path / "beside_it.py").touch()
    config = tiny.config(tmp_path / "run", objective={"path": focal, "gamma": 2.5})
    if said is None:
        assert "(gamma 2.5)" in open_and_plan(config, Reporter(), Rank()).objective.line
        return
    with pytest.raises(UsageError, match=said):
        open_and_plan(config, Reporter(), Rank())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("cross_entropy", None),
        ({"path": "own.py:Focal", "gamma": 1}, None),
        ("weighted_token", "try objective=weighted_tokens"),
        ({"label_smoothing": 0.1, "z_loss": 1e-4}, None),
        ({"label_smoothing": 1.0}, "objective.label_smoothing: input should be less than 1, got 1.0"),
        ({"kind": "weighted_tokens", "label_smoothing": 0.1}, "label_smoothing: weighted_tokens has no fields"),
        ({"beta": 0.1}, "objective.beta: cross_entropy has no such field; its fields are label_smoothing, z_loss"),
        ({"kind": "dpo", "robust": True}, "objective: robust has no effect without label_smoothing, the share"),
        ({"kind": "simpo", "beta": 0}, "objective.beta: input should be greater than 0, got 0"),
        ({"kind": "orpo", "gamma": 1.0}, "objective.gamma: orpo has no such field; its fields are sft_weight, beta"),
        ({"path": "own.py"}, "expected FILE.py:CLASS"),
        ({"path": "own.py:Focal", "kind": "weighted_tokens"}, "keep one"),
    ],
)
def test_settings_of_objectives_are_checked_without_running_code(given, said):
    values = {"model": {"name": "m"}, "objective": given}
    if said is None:
        config = make_config(values)
        assert make_config(json.loads(config.model_dump_json())) == config
        return
    with pytest.raises(ProblemsError, match=said):
        make_config(values)


def test_an_object_of_this_process_is_refused_with_the_setting_that_names_it(tiny, tmp_path):
    class Mine(flatout.Objective):
        pass

    for one in (Mine, Mine()):
        with pytest.raises(UsageError, match=r'try objective=\{"path": "FILE.py:Mine"\}'):
            flatout.train(tiny.config(tmp_path / "run"), objective=one)


def test_a_run_resumes_with_its_own_objective_only(tiny, tmp_path, focal, metrics_of):
    def run(name: str, max_steps: int, **objective: Any) -> Any:
        batch = {"max_steps": max_steps, "micro_batch_tokens": 700}
        checkpoint = {"every_steps": 1, "allow_change": ["batch.max_steps"]}
        schedule = {"kind": "constant", "warmup_steps": 0}
        sections = {"batch": batch, "checkpoint": checkpoint, "schedule": schedule, "objective": objective}
        return train(tiny.config(tmp_path / name, **sections))

    own = {"path": focal, "gamma": 1.0}
    run("whole", 4, **own)
    run("run", 2, **own)
    with pytest.raises(CheckpointError, match=r"objective.gamma: 1.0 in the checkpoint, 2.0 now \(changes the loss\)"):
        run("run", 4, path=focal, gamma=2.0)
    (tmp_path / "own.py").write_text(FOCAL.replace("(1 - p)", "(1.5 - p)", 1))
    with pytest.raises(CheckpointError, match=r"- objective: .* in the checkpoint") as refused:
        run("run", 4, **own)
    assert refused.value.fixes[-1].settings == {"checkpoint.allow_change": ["objective"]}
    (tmp_path / "moved.py").write_text(FOCAL)
    moved = {**own, "path": f"{tmp_path / 'moved.py'}:Focal"}
    run("run", 4, **moved)
    run("run", 4, **moved)  # it is complete, and says so
    losses = [[line["loss"] for line in metrics_of(tmp_path / name)] for name in ("run", "whole")]
    assert losses[0] == losses[1]
    ours, whole = (tmp_path / name / "final" / "adapter_model.safetensors" for name in ("run", "whole"))
    assert ours.read_bytes() == whole.read_bytes()
