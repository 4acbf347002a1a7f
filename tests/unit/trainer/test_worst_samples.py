"""The evaluation samples with the greatest losses: as plain transformers has them, with their text, on every page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_losses import PAIRS, Answer
from transformers import AutoModelForCausalLM
from unit_store import write_units

from flatout.cli.main import main
from flatout.config.read import make_config
from flatout.data import registry
from flatout.data.token_store import TokenStore
from flatout.errors import DataError
from flatout.track.run_log import read_run
from flatout.trainer.run import train
from tests.usual import usual

WRONG = "zq vx <b>jk</b> qz xv kj zz"


@pytest.fixture(scope="module")
def held_out(tiny, tmp_path_factory):
    """A built data set of 24 chats, one of which has a wrong answer."""
    root = tmp_path_factory.mktemp("held-out")
    rows = [json.loads(line)["messages"] for line in tiny.chats.read_text().splitlines()[:24]]
    rows[5][-1]["content"] = WRONG
    (root / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    words = ["--tokenizer", str(tiny.model_dir), "--name", "held-out", "--root", str(root), "--num-procs", "1"]
    assert main(["data", "build", str(root / "rows.jsonl"), *words, "--max-tokens", "500"]) == 0
    return root


def trained(tiny: Any, root: Path, run_dir: Path, *words: str) -> Any:
    (run_dir.parent / f"{run_dir.name}.yaml").write_text(
        f"run_dir: {run_dir}\ndevice: cpu\nseed: 7\nmodel: {{name: '{tiny.model_dir}', precision: fp32}}\n"
        f"data: {{name: chats, root: '{root}', sources: [{{path: '{tiny.chats}'}}], max_tokens: 500}}\n"
        "lora: {rank: 4, alpha: 8}\nbatch: {samples_per_step: 6, micro_batch_tokens: 700, max_steps: 1}\n"
        "eval: {data: held-out, prompts: []}\noptim: {lr: 1.0e-9}\n"
    )
    assert main(["train", str(run_dir.parent / f"{run_dir.name}.yaml"), *words]) == 0
    return read_run(run_dir)


@pytest.mark.parametrize("words", [(), ("batch.layout=rows",)])
def test_the_losses_are_those_of_plain_transformers(tiny, held_out, tmp_path, words):
    record = trained(tiny, held_out, tmp_path / "run", "eval.worst_samples=64", *words).evals[-1]
    store = TokenStore.open(held_out / "built_dataset" / "held-out")
    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir, dtype=torch.float32)
    expected = {}
    for index in range(store.num_samples):
        ids, mask = (torch.from_numpy(part.copy()) for part in store.sample(index).pair)
        with torch.no_grad():
            logits = model(ids[None].long()).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:].long(), reduction="none")
        expected[store.origin(index).row_number] = float(losses[mask[1:]].mean())
    assert {one.row: one.loss for one in record.worst} == pytest.approx(expected, rel=1e-4)
    assert [one.loss for one in record.worst] == sorted((one.loss for one in record.worst), reverse=True)
    total = sum(one.loss * one.num_label_tokens for one in record.worst)
    assert total / record.num_label_tokens == pytest.approx(record.eval_loss, rel=1e-4)


def test_a_wrong_answer_stands_first_on_every_page(tiny, held_out, tmp_path, capsys):
    learning = ("optim.lr=0.02", "batch.max_steps=30")
    record = trained(tiny, held_out, tmp_path / "run", *learning).evals[-1]
    assert len(record.worst) == 8
    worst = record.worst[0]
    assert (worst.data, worst.row) == ("held-out", 6)
    assert worst.source.endswith("rows.jsonl")
    assert WRONG in worst.text
    assert WRONG not in worst.context
    capsys.readouterr()
    pages = []
    for form in ("html", "json", "md"):
        assert main(["report", str(tmp_path / "run"), "--format", form, "--out", str(tmp_path / f"page.{form}")]) == 0
        pages.append((tmp_path / f"page.{form}").read_text())
    for page in (pages[0], pages[2]):
        assert "<b>jk</b>" not in page
        assert WRONG.replace("<", "&lt;").replace(">", "&gt;") in page
    assert WRONG in json.loads(pages[1])["runs"][0]["evals"][-1]["worst"][0]["text"]


# objective -> the units of a data set, or rows with labels
JUDGED: dict[str, dict[str, Any]] = {
    "simpo": {"sizes": [2] * 12},
    "reward": {"sizes": [2] * 12},
    "kto": {"sizes": [1] * 12, "labels": [1, 0, 0] * 4},
    "classify": {"rows": [{"text": f"a text {k}" + "." * (k % 3), "label": "xyz"[k % 3]} for k in range(12)]},
}


@pytest.mark.parametrize("kind", usual(JUDGED, ["simpo", "kto", "classify"]))
def test_pairs_and_labelled_answers_stand_there_with_their_losses(tiny, tmp_path, kind):
    given = dict(JUDGED[kind])
    objective: dict[str, Any] = {"kind": kind}
    if kind == "kto":
        objective |= {"desirable_weight": 2.0, "undesirable_weight": 0.5}
    data: dict[str, Any] = {"name": "d", "root": str(tmp_path)}
    if rows := given.pop("rows", None):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data["sources"] = [{"path": str(tmp_path / "rows.jsonl")}]
    else:
        write_units(tmp_path, tiny.model_dir, name="d", **given)
    values = {
        "run_dir": str(tmp_path / "run"), "device": "cpu", "data": data, "objective": objective,
        "model": {"name": str(tiny.model_dir), "precision": "fp32"}, "optim": {"lr": 1e-9}, "lora": {"rank": 4},
        "batch": {"samples_per_step": 4, "micro_batch_tokens": 500, "max_steps": 1},
        "eval": {"fraction": 0.5, "worst_samples": 64, "prompts": []},
    }  # fmt: skip
    train(make_config(values))
    record, store = read_run(tmp_path / "run").evals[-1], TokenStore.open(registry.built_dir(tmp_path, "d"))
    assert len(record.worst) == 6
    assert [one.loss for one in record.worst] == sorted((one.loss for one in record.worst), reverse=True)
    assert sum(one.loss for one in record.worst) / 6 == pytest.approx(record.eval_loss, rel=1e-4)
    if kind == "kto":
        assert {one.text.partition(": ")[0] for one in record.worst if one.loss > 0.5} == {"desirable"}
        assert {one.text.partition(": ")[0] for one in record.worst if one.loss < 0.5} == {"undesirable"}
    elif kind == "classify":
        assert all(one.text.startswith(f"{rows[one.row - 1]['label']}: a text {one.row - 1}") for one in record.worst)
    else:
        assert all(one.text.startswith("chosen: ") and "\n\nrejected: " in one.text for one in record.worst)
    if kind != "simpo":
        return
    _, loss_of, _ = PAIRS["simpo"]
    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir, dtype=torch.float32)
    for one in record.worst:
        both = [store.sample(2 * (one.row - 1) + place).pair for place in (0, 1)]
        pair = [Answer(model, *(torch.tensor(part.tolist()) for part in own), 0.0) for own in both]
        assert one.loss == pytest.approx(loss_of(*pair).item(), rel=1e-4)
        assert one.num_label_tokens == sum(answer.n for answer in pair)


OWN = """
from flatout.objectives.protocol import Objective

class Own(Objective):
    scope = "sample"
    def __call__(self, labels):
        return {"loss": -labels.by_sample(labels.logprobs).sum()}

class Telling(Own):
    def __call__(self, labels):
        labels.example_losses = -labels.by_sample(labels.logprobs)
        return super().__call__(labels)

class Wrong(Own):
    def __call__(self, labels):
        labels.example_losses = -labels.logprobs
        return super().__call__(labels)
"""


def test_nothing_is_recorded_where_nobody_asks_or_a_sample_has_no_loss(tiny, held_out, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    default = trained(tiny, held_out, tmp_path / "default").evals[-1]
    off = trained(tiny, held_out, tmp_path / "off", "eval.worst_samples=0").evals[-1]
    own = trained(tiny, held_out, tmp_path / "own", f"objective.path={tmp_path / 'own.py'}:Own").evals[-1]
    assert (len(default.worst), off.worst, own.worst) == (8, (), ())
    # what is read of a pass changes no bit of it
    assert off.eval_loss == default.eval_loss
    assert own.eval_loss == pytest.approx(default.eval_loss, rel=1e-5)


def test_an_own_objective_may_tell_the_loss_of_each(tiny, held_out, tmp_path, capfd):
    (tmp_path / "own.py").write_text(OWN)
    told = trained(tiny, held_out, tmp_path / "run", f"objective.path={tmp_path / 'own.py'}:Telling").evals[-1]
    assert len(told.worst) == 8
    with pytest.raises(AssertionError):
        trained(tiny, held_out, tmp_path / "wrong", f"objective.path={tmp_path / 'own.py'}:Wrong")
    assert "objective Wrong set `example_losses` of shape" in " ".join(capfd.readouterr().err.split())


def test_one_tokenizer_serves_an_evaluation_and_one_that_is_gone_ends_no_run(tiny, held_out, tmp_path, monkeypatch):
    calls = list[int]()

    def gone(*_: Any) -> Any:
        calls.append(1)
        raise DataError("its tokenizer is gone")

    monkeypatch.setattr("flatout.trainer.evaluate.tokenizer_of", gone)
    evals = trained(tiny, held_out, tmp_path / "run", "eval.prompts=[]", "batch.max_steps=2").evals
    assert len(calls) == len(evals)
    assert [len(record.worst) for record in evals] == [8] * len(evals)
    assert not any(one.text or one.context for record in evals for one in record.worst)
    assert "without their text: its tokenizer is gone" in " ".join((tmp_path / "run" / "train.log").read_text().split())
