"""docs/models.md is what its script writes, and the script still measures models, by the command, as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_table import PAGE, RESULTS, measure, page, run_apart
from model_table import tiny as tiny_shape

from flatout.cli.main import main

RECORDED: dict[str, Any] = json.loads(RESULTS.read_text())["models"]
# one of each kind: rows, experts packed with masked tokens between documents, a soft-cap of the logits, an indexer that
# no gradient reaches
SAMPLE = ["gpt_neo", "lfm2_moe", "xlstm", "deepseek_v32"]


def test_the_page_is_written_from_the_results() -> None:
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()))


def test_few_models_are_refused_and_none_is_inexact() -> None:
    counted = [row for row in RECORDED.values() if row["counts"]]
    refused = [row["refused"] for row in counted if "refused" in row]
    assert len(refused) <= 0.03 * len(counted)
    assert not [reason for reason in refused if "INEXACT" in reason or "TRACEBACK" in reason]


@pytest.mark.parametrize(
    "model_type",
    [
        *SAMPLE,
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in RECORDED if name not in SAMPLE),
    ],
)
def test_a_model_trains_as_the_page_says(model_type: str) -> None:
    """Two steps of `flatout train`, full and LoRA, and passes: each within the table's limits, or refused as there."""
    row, recorded = run_apart(measure, model_type, 600), RECORDED[model_type]
    if not recorded["counts"] or "refused" in recorded:
        assert isinstance(row, str) or not row["counts"] or "refused" in row
        return
    assert "refused" not in row
    facts = ("layout", "targets", "has_experts", "no_adapter", "no_experts")
    assert {name: row.get(name) for name in facts} == {name: recorded.get(name) for name in facts}


def test_token_ids_without_a_logit_are_refused_and_others_train(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_an_encoder_decoder_does_not_count() -> None:
    assert measure("pix2struct") == {"counts": False, "reason": "an encoder-decoder"}
