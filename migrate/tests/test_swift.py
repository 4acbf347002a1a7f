"""Runs of what `flatout convert` makes of ms-swift's commands; conversions.jsonl has the translations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from usual import every

from flatout.cli.main import main
from flatout.config.read import load_config


def converted(folder: Path, text: str, *words: str, name: str = "run.sh") -> dict[str, Any]:
    (folder / name).write_text(text)
    out = folder / "out.yaml"
    assert main(["convert", str(folder / name), "--to", str(out), *words]) == 0
    load_config(out)
    values: dict[str, Any] = yaml.safe_load(out.read_text())
    return values


@pytest.mark.parametrize("kind", every(2, ["dpo", "kto"]))
def test_rows_of_ms_swift_train(tiny: Any, tmp_path: Path, kind: str) -> None:
    rows = []
    for k in range(8):
        turns = [{"role": "user", "content": f"What is {k}?"}, {"role": "assistant", "content": f"{k}."}]
        judged = {"rejected_response": "No."} if kind == "dpo" else {"label": k % 2 == 0}
        rows.append({"messages": turns, **judged})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"swift rlhf --rlhf_type {kind} --model {tiny.model_dir} --dataset {tmp_path}/rows.jsonl --max_length 200"
    words = [f"data.root={tmp_path}", f"run_dir={tmp_path / 'run'}", "batch.max_steps=1", "device=cpu"]
    converted(tmp_path, f"{text} --gradient_accumulation_steps 4\n", *words, "data.template=chatml")
    assert main(["train", str(tmp_path / "out.yaml"), "model.precision=fp32"]) == 0


def test_rows_of_answers_train(tiny: Any, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": f"b{i}"}]} for i in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"swift sft --model {tiny.model_dir} --dataset {tmp_path}/rows.jsonl --max_length 200"
    words = [f"data.root={tmp_path}", f"run_dir={tmp_path / 'run'}", "batch.max_steps=1", "device=cpu"]
    converted(tmp_path, f"{command} --gradient_accumulation_steps 4\n", *words, "data.template=chatml")
    assert main(["train", str(tmp_path / "out.yaml"), "model.precision=fp32"]) == 0
