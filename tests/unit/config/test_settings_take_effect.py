"""No setting is ignored: with another value a run trains, writes or prints something else, or is refused."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flatout.errors import FlatoutError
from tests.usual import usual

TESTS = Path(__file__).parents[2]
EVAL = {"eval": {"fraction": 0.2, "every_steps": 2}}
FULL = {"method": "full"}
CUT = {"data": {"max_tokens": 200, "too_long": "truncate"}}
FEW = {"data": {"num_samples": 20}}
QWEN = {"data": {"template": "qwen3"}}

# setting -> (its other value, the settings that it needs)
TRAINS: dict[str, tuple[Any, dict[str, Any]]] = {
    "seed": (8, {}),
    "method": ("full", {}),
    "freeze": ([r".*embed_tokens.*"], FULL),
    "model.init": ("random", {}),
    "model.precision": ("fp64", {}),
    "model.attention": ("plain", {}),
    "data.template": ("qwen3", {}),
    "data.loss_type": ("all", {}),
    "data.new_tokens": (["<tool>"], {}),
    "data.new_special_tokens": (["<tool>"], {}),
    "data.max_tokens": (100, CUT),
    "data.too_long": ("drop", CUT),
    "data.num_samples": (20, {}),
    "data.shuffle": (False, FEW),
    "data.seed": (1, FEW),
    "data.sources.system": ("Be brief.", {}),
    "model.neftune_alpha": (5.0, {}),
    "lora.rank": (8, {}),
    "lora.alpha": (16.0, {}),
    "lora.dropout": (0.5, {}),
    "lora.targets": (["q_proj"], {}),
    "lora.rslora": (True, {}),
    "lora.init": ("gaussian", {}),
    "lora.layers": ("1", {}),
    "lora.rank_pattern": ({"q_proj": 2}, {}),
    "lora.alpha_pattern": ({"q_proj": 2}, {}),
    "lora.modules_to_save": (["norm"], {}),
    "lora.keep_tied": (False, {"lora": {"modules_to_save": ["lm_head"]}}),
    "lora.dora": (True, {}),
    "base.storage": ("nf4", {}),
    "base.backward": ("fp8", {}),
    "full.weights": ("bf16", {**FULL, "model": {"precision": "bf16"}}),
    "full.hidden_states": ("model", {**FULL, "model": {"precision": "bf16"}}),
    "batch.samples_per_step": (5, {}),
    "batch.epochs": (0.1, {"batch": {"max_steps": None, "epochs": 0.2}}),
    "batch.max_steps": (2, {}),
    "batch.shuffle": (False, {}),
    "optim.name": ("sgd", {}),
    "optim.lr": (1e-2, {}),
    "optim.lr_ratio": (4.0, {}),
    "optim.beta1": (0.5, {}),
    "optim.beta2": (0.5, {}),
    "optim.eps": (1e-3, {}),
    "optim.weight_decay": (0.5, {}),
    "optim.max_grad_norm": (1e-3, {}),
    "schedule.kind": ("constant", {}),
    "schedule.warmup_steps": (2, {}),
    "schedule.warmup_ratio": (0.5, {}),
    "schedule.min_lr_ratio": (0.5, {}),
    "schedule.decay_ratio": (0.5, {"schedule": {"kind": "wsd", "warmup_steps": 1}}),
    "eval.fraction": (0.4, EVAL),
    "eval.min_delta": (100.0, {"eval": {**EVAL["eval"], "patience": 1}}),
    "eval.patience": (1, {"eval": {**EVAL["eval"], "patience": 2, "min_delta": 100.0}}),
    "log_every_steps": (2, {}),
    "data.empty_reasoning": ("mask", QWEN),
    "data.sources.roles": ({"user": "assistant"}, {}),
    "data.sources.weight": (2.0, {}),
    "base.compute": ("fp8", {"base": {"storage": "nf4"}}),
    "batch.micro_batch_tokens": (1000, {}),
    "batch.layout": ("rows", {}),
    "eval.every_steps": (1, EVAL),
    "checkpoint.every_steps": (1, {}),
    "checkpoint.keep": (1, {"checkpoint": {"every_steps": 1}}),
    "run_dir": ("elsewhere", {}),
}
# setting -> (its other value, the settings that it needs, what the run prints or is refused with)
SAYS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "full.update": (
        "backward",
        {**FULL, "optim": {"max_grad_norm": None}, "batch": {"micro_batch_tokens": 3000}},
        "updates in the backward pass",
    ),
    "name": ("other", {}, "run: other|other: lora"),
    "device": ("cuda", {}, "device: cuda needs a GPU, but"),
    "model.name": ("/nowhere", {}, "there is no folder /nowhere"),
    "model.revision": ("abc", {}, "model.revision: 'abc' is for hub ids"),
    "data.name": ("other", {}, "built_dataset/other"),
    "data.root": ("elsewhere", {}, "elsewhere/built_dataset/chats"),
    "data.tokenizer": ("/nowhere", {}, "there is no folder /nowhere"),
    "data.template_args": ({"enable_thinking": False}, QWEN, "'enable_thinking': False"),
    "data.special_tokens": ("text", {}, "special_tokens=None, but text is configured"),
    "data.sources.path": ("/nowhere.jsonl", {}, "/nowhere.jsonl: no such file"),
    "data.sources.format": ("text", {}, "no column 'text'"),
    "data.sources.columns": ({"messages": "nothing"}, {}, "no column 'nothing'"),
    "data.sources.keys": ({"role": "ignored"}, {}, "'role' is a key that flatout reads"),
    "data.sources.split": ("test", {}, "no files of split 'test'"),
    "data.sources.subset": ("en", {}, "subset: 'en' is for hub ids"),
    "data.sources.revision": ("abc", {}, "revision: 'abc' is for hub ids"),
    "data.sources.hub": (True, {}, "hub data set"),
    "lora.continue_from": ("/nowhere", {}, "/nowhere/adapter_config.json is missing"),
    "full.compute": ("fp8", FULL, "full.compute: fp8 needs a CUDA GPU"),
    "recompute": ("full", {}, "recompute full"),
    "compile": ("off", {}, "compile +off: as configured"),
    "cuda_graphs": ("off", {}, "graphs +off: as configured"),
    "strategy": ("ddp", {}, "one rank, so not ddp"),
    "checkpoint.asynchronous": (False, {}, "training waits for each save: as configured"),
    "eval.data": ("absent", {"eval": {"every_steps": 2}}, "absent"),
    "eval.prompts": (["What is 1 + 1?"], EVAL, "answers +1 prompts"),
    "eval.max_new_tokens": (
        2,
        {"eval": {**EVAL["eval"], "prompts": ["a", "b"], "max_new_tokens": 1}},
        "at most 2 tokens",
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What a run left: weights, metrics and files, what it printed or was refused with, and where its data is."""

    weights: dict[str, torch.Tensor]
    metrics: list[dict[str, Any]]
    files: set[str]
    text: str
    root: str


def merged(*sections: dict[str, Any]) -> dict[str, Any]:
    """Settings by section; later ones replace earlier ones."""
    result: dict[str, Any] = {}
    for name, value in (item for each in sections for item in each.items()):
        result[name] = {**result.get(name, {}), **value} if isinstance(value, dict) else value
    return result


def run(tiny: Any, folder: Path, sections: dict[str, Any], root: Path | None = None) -> Outcome:
    from flatout.trainer.run import train

    sections = merged({"batch": {"max_steps": 4}, "data": {"root": str(root or folder / "data")}}, sections)
    run_dir = folder / sections.pop("run_dir", "run")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            train(tiny.config(run_dir, **sections))
    except FlatoutError as error:
        return Outcome({}, [], set(), f"{printed.getvalue()}{error}", sections["data"]["root"])
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (weights,) = (run_dir / "final").glob("*.safetensors")
    return Outcome(
        load_file(weights),
        [{name: record.get(name) for name in ("kind", "step", "loss", "lr", "grad_norm")} for record in records],
        {str(path.relative_to(folder)) for path in run_dir.rglob("*") if path.is_file()},
        printed.getvalue(),
        sections["data"]["root"],
    )


def changed(tiny: Any, setting: str, value: Any) -> dict[str, Any]:
    section, _, name = setting.rpartition(".")
    if section == "data.sources":
        source = {"path": str(tiny.chats), name: value}
        if name != "weight":
            return {"data": {"sources": [source]}}
        more = tiny.chats.with_name("more.jsonl")
        more.write_text("".join(tiny.chats.read_text().splitlines(keepends=True)[:30]))
        return {"data": {"sources": [source, {"path": str(more)}]}}
    return {section: {name: value}} if section else {name: value}


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Runs with the tiny model; equal settings run once, and equal settings of data are built once."""
    done: dict[str, Outcome] = {}
    roots: dict[str, Path] = {}

    def outcome(sections: dict[str, Any]) -> Outcome:
        key, data = (json.dumps(part, sort_keys=True) for part in (sections, sections.get("data", {})))
        if key not in done:
            root = roots.setdefault(data, tmp_path_factory.mktemp("data"))
            done[key] = run(tiny, tmp_path_factory.mktemp("effect"), sections, root)
        return done[key]

    return outcome


# one of every section; the others are set by tests of what they do
USUAL = (
    "freeze", "model.precision", "data.loss_type", "data.sources.system", "lora.rank_pattern", "base.backward",
    "batch.layout", "optim.eps", "schedule.min_lr_ratio", "eval.fraction", "checkpoint.keep", "data.special_tokens",
    "strategy",
)  # fmt: skip


@pytest.mark.parametrize("setting", usual(TRAINS, USUAL))
def test_a_setting_changes_what_a_run_trains_or_writes(setting, tiny, runs):
    value, needed = TRAINS[setting]
    if setting == "data.sources.weight":
        needed = changed(tiny, setting, 1.0)
    before, after = runs(needed), runs(merged(needed, changed(tiny, setting, value)))
    assert before.weights, before.text
    assert after.weights, after.text
    same_weights = before.weights.keys() == after.weights.keys() and all(
        torch.equal(tensor, after.weights[name]) for name, tensor in before.weights.items()
    )
    assert not (same_weights and before.metrics == after.metrics and before.files == after.files)


def test_equal_settings_train_and_write_the_same(tiny, tmp_path, runs):
    before, after = runs({}), run(tiny, tmp_path, {})
    assert all(torch.equal(tensor, after.weights[name]) for name, tensor in before.weights.items())
    assert (before.metrics, before.files) == (after.metrics, after.files)


@pytest.mark.parametrize("setting", usual(SAYS, USUAL))
def test_a_setting_changes_what_a_run_says(setting, tiny, tmp_path, runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value, needed, text = SAYS[setting]
    before = runs(needed)
    assert not re.search(text, " ".join(before.text.split()))
    # the old and the new value read one data set
    needed = merged(needed, {"data": {"root": before.root}})
    after = run(tiny, tmp_path / "after", merged(needed, changed(tiny, setting, value)))
    # lines wrap at 80 columns
    assert re.search(text, " ".join(after.text.split())), after.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_deterministic_runs_are_equal_to_the_bit(tiny, tmp_path):
    sections = {"device": "cuda", "deterministic": True}
    one, two = (run(tiny, tmp_path / name, sections) for name in ("one", "two"))
    assert one.weights, one.text
    assert all(torch.equal(tensor, two.weights[name]) for name, tensor in one.weights.items())
    assert not torch.are_deterministic_algorithms_enabled(), "the next run is as it was"


def test_several_gpus_are_refused_in_one_process(tiny, tmp_path):
    assert "gpus: [0, 1] needs one process per GPU" in run(tiny, tmp_path, {"gpus": [0, 1]}).text


def test_a_folder_with_checkpoints_is_not_started_anew(tiny, tmp_path):
    each = {"checkpoint": {"every_steps": 1}}
    assert run(tiny, tmp_path, each).weights
    assert "checkpoint.resume is never" in run(tiny, tmp_path, merged(each, {"checkpoint": {"resume": "never"}})).text
