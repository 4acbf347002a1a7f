"""Whole runs with every sample as a padded row: hybrids under `auto`, the same losses as packed, resume, verify."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import as_after, require_equal, state_of
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.errors import PackingError
from flatout.trainer.run import train

STATE_SPACE = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16}


def save_model(folder: Path, tiny: Any, family: str, **shape: Any) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](vocab_size=len(tokenizer), **sizes, **ends, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def run_of(tiny: Any, folder: Path, model: Path, /, **sections: Any) -> Any:
    sections["batch"] = {"max_steps": 3, "micro_batch_tokens": 1500, **sections.get("batch", {})}
    return tiny.config(folder, model={"name": str(model), **sections.pop("model", {})}, **sections)


def stages(folder: Path, name: str) -> list[str]:
    return re.findall(rf"{name} +(.*)", (folder / "train.log").read_text())


def test_a_hybrid_trains_as_typed_and_says_why_it_takes_rows(tiny, tmp_path, capsys, metrics_of):
    model = save_model(tmp_path / "model", tiny, "mamba2", **STATE_SPACE)
    answers = {"fraction": 0.1, "prompts": None, "max_new_tokens": 4}
    # PEFT refuses Mamba's out_proj
    config = run_of(tiny, tmp_path / "run", model, eval=answers, lora={"targets": ["in_proj"]})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "layout rows: its recurrent state leaks between packed documents without mamba-ssm and causal-conv1d" in said
    assert "self-test rows = alone within" in said
    records = metrics_of(tmp_path / "run")
    assert all(0 < record["padding_share"] < 0.5 for record in records)
    answers = json.loads((tmp_path / "run" / "answers.jsonl").read_text().splitlines()[-1])["answers"]
    assert len(answers) == 3
    start = json.loads((tmp_path / "run" / "start.json").read_text())
    assert start["plan"]["layout"] == "rows"
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    assert "of the tokens computed, as each sample is a padded row" in " ".join(capsys.readouterr().out.split())
    assert main(["train", str(tmp_path / "run.yaml"), "batch.layout=packed", "name=other"]) == 2
    assert "try batch.layout=auto" in " ".join(capsys.readouterr().err.split())


def test_a_model_that_fails_the_self_test_packed_is_planned_again_with_rows(tiny, tmp_path):
    model = save_model(tmp_path / "model", tiny, "bloom", n_layer=2, n_head=4)
    train(run_of(tiny, tmp_path / "run", model))
    first, second = stages(tmp_path / "run", "layout")
    assert first.startswith("packed")
    assert second.startswith("rows: model type bloom fails on packed documents")
    with pytest.raises(PackingError, match="bloom fails on packed"):
        train(run_of(tiny, tmp_path / "other", model, batch={"layout": "packed"}))


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.exhaustive)])
def test_rows_take_the_same_steps_as_packed_and_resume_to_the_bit(tiny, tmp_path, metrics_of, method):
    settings = {"method": method, "checkpoint": {"every_steps": 1, "keep": 9}, "eval": {"fraction": 0.1}}
    settings["model"] = {"neftune_alpha": 5.0}
    rows = run_of(tiny, tmp_path / "rows", tiny.model_dir, batch={"layout": "rows"}, **settings)
    train(rows)
    train(run_of(tiny, tmp_path / "packed", tiny.model_dir, **settings))
    for kind, name in (("step", "loss"), ("step", "grad_norm"), ("eval", "eval_loss")):
        ours, packed = ([record[name] for record in metrics_of(tmp_path / run, kind)] for run in ("rows", "packed"))
        assert ours == pytest.approx(packed, rel=1e-4)
    train(rows.model_copy(update={"run_dir": as_after(tmp_path / "rows", 1, tmp_path / "again")}))
    require_equal(state_of(tmp_path / "again", 3), state_of(tmp_path / "rows", 3))


@pytest.mark.exhaustive
def test_ranks_and_strategies_agree_on_a_hybrid(tiny, tmp_path):
    model = save_model(tmp_path / "model", tiny, "mamba2", **STATE_SPACE)
    config = run_of(tiny, tmp_path / "run", model, lora={"targets": ["in_proj"]})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert main(["verify", str(tmp_path / "run.yaml"), "--ranks", "2"]) == 0
    rows = {row["case"]: row for row in json.loads((tmp_path / "run" / "verify.json").read_text())["rows"]}
    assert {"ddp", "zero1", "zero2", "zero3", "fsdp", "each sample alone"} < rows.keys()
    assert any(case.startswith("rows, ") for case in rows)
    assert max(row["worst_difference"] for row in rows.values()) < 1e-4
