"""`flatout eval --rows`: how often a model that scores is right, against transformers' own scores of each text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from flatout.cli.main import main
from flatout.trainer.run import train

LABELS = ("bad", "good", "so-so")
TEXTS = [{"review": "it was " + "great " * (k % 4) + "." * (k % 3), "stars": LABELS[k % 3]} for k in range(15)]
PAIRS = [
    {"prompt": f"What is {k}?", "chosen": f"It is {k}." * (k % 3 + 1), "rejected": "well" + " so" * (k % 4)}
    for k in range(12)
]
SHORT: dict[str, Any] = {"batch": {"max_steps": 2, "samples_per_step": 4}, "optim": {"lr": 5e-3}}


def run_on(tiny: Any, tmp_path: Path, rows: list[dict[str, Any]], objective: str, **source: Any) -> Path:
    file = tmp_path / f"{objective}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"name": objective, "root": str(tmp_path / "data"), "sources": [{"path": str(file), **source}]}
    train(tiny.config(tmp_path / "run", objective=objective, data=data, **SHORT))
    return file


def test_labels_are_judged_as_transformers_gives_them(tiny, tmp_path, capsys):
    file = run_on(tiny, tmp_path, TEXTS, "classify", columns={"text": "review", "label": "stars"})
    assert main(["merge", str(tmp_path / "run"), "--out", str(tmp_path / "merged")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    said = []
    for row in TEXTS:
        ids = tokenizer(row["review"] + tokenizer.eos_token, return_tensors="pt")["input_ids"]
        said.append(model.config.id2label[int(model(ids).logits.argmax())])
    right = sum(one == row["stars"] for one, row in zip(said, TEXTS, strict=True))
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--rows", str(file), "--device", "cpu"]) == 0
    assert f"accuracy: {right} of 15 right" in capsys.readouterr().out
    written = json.loads((tmp_path / "run/eval/classify.json").read_text())
    f1 = [
        2 * sum(one == row["stars"] == label for one, row in zip(said, TEXTS, strict=True))
        / (said.count(label) + 5) for label in LABELS
    ]  # fmt: skip
    assert written["macro_f1"] == pytest.approx(sum(f1) / 3)
    # one label is enough to judge by; another one is an error
    one = tmp_path / "one.jsonl"
    for label, code in (("good", 0), ("other", 3)):
        one.write_text(json.dumps({"review": "it was great", "stars": label}) + "\n")
        assert main(["eval", str(tmp_path / "run"), "--rows", str(one), "--device", "cpu"]) == code
    assert "label 'other' is none of those that are trained" in capsys.readouterr().err


def test_pairs_are_judged_by_the_scores_of_their_answers(tiny, tmp_path, capsys):
    file = run_on(tiny, tmp_path, PAIRS, "reward")
    final = tmp_path / "run/final"
    tokenizer = AutoTokenizer.from_pretrained(final)
    base = AutoModelForSequenceClassification.from_pretrained(tiny.model_dir, config=AutoConfig.from_pretrained(final))
    base.load_adapter(str(final))
    scores = []
    for row in PAIRS:
        chats = [[{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[one]}] for one in
                 ("chosen", "rejected")]  # fmt: skip
        with torch.no_grad():
            ids = [tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False) for chat in chats]
            scores.append([float(base(own).logits) for own in ids])
    right, margin = sum(c > r for c, r in scores), sum(c - r for c, r in scores) / len(scores)
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--rows", str(file), "--device", "cpu"]) == 0
    assert f"accuracy: {right} of 12 right" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/eval/reward.json").read_text())["margin"] == pytest.approx(margin, rel=1e-4)
    assert main(["eval", str(tmp_path / "run"), "--answers", str(file), "--device", "cpu"]) != 0
    assert main(["eval", str(tiny.model_dir), "--rows", str(file), "--device", "cpu"]) == 2
    assert "generates text and gives no scores" in capsys.readouterr().err
