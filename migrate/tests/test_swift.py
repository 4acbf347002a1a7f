"""Runs of what `flatout convert` makes of ms-swift's commands; conversions.jsonl has the translations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from usual import every

from flatout.cli.main import main


@pytest.mark.parametrize("kind", every(2, ["dpo", "kto", "sft"]))
def test_rows_of_ms_swift_train(tiny: Any, tmp_path: Path, kind: str) -> None:
    rows = []
    for k in range(8):
        turns = [{"role": "user", "content": f"What is {k}?"}, {"role": "assistant", "content": f"{k}."}]
        judged = {"dpo": {"rejected_response": "No."}, "kto": {"label": k % 2 == 0}, "sft": {}}[kind]
        rows.append({"messages": turns, **judged})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = "swift sft" if kind == "sft" else f"swift rlhf --rlhf_type {kind}"
    given = f"--model {tiny.model_dir} --dataset {tmp_path}/rows.jsonl --max_length 200 --gradient_accumulation_steps 4"
    (tmp_path / "run.sh").write_text(f"{command} {given}\n")
    words = [f"data.root={tmp_path}", f"run_dir={tmp_path / 'run'}", "batch.max_steps=1", "data.template=chatml"]
    out = str(tmp_path / "out.yaml")
    assert main(["convert", str(tmp_path / "run.sh"), "--to", out, *words, "device=cpu"]) == 0
    assert main(["train", out, "model.precision=fp32"]) == 0
