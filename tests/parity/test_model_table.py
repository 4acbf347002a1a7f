"""docs/models.md is what its script writes, and the script still measures models, by the command, as it says."""

from __future__ import annotations

import json
from typing import Any

from model_table import PAGE, RESULTS, page
from model_table import tiny as tiny_shape

from flatout.cli.main import main

RECORDED: dict[str, Any] = json.loads(RESULTS.read_text())["models"]


def test_the_page_is_written_from_the_results():
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()))


def test_few_models_are_refused_and_none_is_inexact():
    counted = [row for row in RECORDED.values() if row["counts"]]
    refused = [row["refused"] for row in counted if "refused" in row]
    assert len(refused) <= 0.03 * len(counted)
    assert not [reason for reason in refused if "INEXACT" in reason or "TRACEBACK" in reason]


def test_token_ids_without_a_logit_are_refused_and_others_train(tiny, tmp_path, capsys):
    """Inkling cuts the padding of its vocabulary off its logits."""
    shape = tiny_shape("inkling_text")
    shape.unpadded_vocab_size = 290
    shape.save_pretrained(tmp_path / "model")
    for last_id, code in ((289, 0), (290, 3)):
        file = tmp_path / f"{last_id}.jsonl"
        file.write_text(json.dumps({"input_ids": [*range(3, 20), last_id]}) + "\n")
        settings = {
            "run_dir": str(tmp_path / f"run-{last_id}"), "device": "cpu", "method": "full",
            "model": {"name": str(tmp_path / "model"), "init": "random", "precision": "fp32"},
            "data": {"sources": [{"path": str(file)}], "root": str(tmp_path), "tokenizer": str(tiny.model_dir)},
            "batch": {"max_steps": 1},
        }  # fmt: skip
        (tmp_path / "run.yaml").write_text(json.dumps(settings))
        assert main(["train", str(tmp_path / "run.yaml")]) == code
    said = " ".join(capsys.readouterr().err.split())
    assert "token ids 290..290, but the model has logits for 0..289 only (unpadded_vocab_size" in said
