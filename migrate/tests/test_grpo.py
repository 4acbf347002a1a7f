"""GRPO of TRL and Unsloth: a notebook trains unchanged, and converts; conversions.jsonl has each name."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import flatout
from flatout.cli.main import main
from flatout.errors import FlatoutError
from flatout_migrate.unsloth.trl import GRPOConfig, GRPOTrainer

NOTEBOOK = '''
import re
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification
from {unsloth} import FastLanguageModel, PatchFastRL
from {trl} import GRPOConfig, GRPOTrainer
PatchFastRL("GRPO", FastLanguageModel)
model, tokenizer = FastLanguageModel.from_pretrained({model!r}, max_seq_length=500, load_in_4bit=False,
                                                     fast_inference=True, max_lora_rank=4)
model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, random_state=7)
SYSTEM = """Answer in
<answer>...</answer>"""
VOWELS = "ae"
PATTERN = re.compile(f"[{{VOWELS}}]")
def question(row):
    return f"What is {{row['n']}}?"
rows = load_dataset("json", data_files="rows.jsonl", split="train")
rows = rows.map(lambda row: {{"prompt": [{{"role": "system", "content": SYSTEM}},
                                       {{"role": "user", "content": question(row)}}]}})
def vowels(completions, bonus, **kwargs):
    return [len(PATTERN.findall(one[0]["content"])) + more for one, more in zip(completions, bonus)]
async def length(completions, **kwargs):
    return [len(one[0]["content"]) / 10 for one in completions]
judge = AutoModelForSequenceClassification.from_pretrained("./judge", num_labels=1)
args = GRPOConfig("outputs", learning_rate=5e-3, per_device_train_batch_size=1, gradient_accumulation_steps=2,
                  num_generations=4, max_prompt_length=400, max_completion_length=8, num_train_epochs=1,
                  reward_weights=[1.0, 0.5, 0.1], beta=0.01, report_to="none", use_cpu=True)
trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[vowels, length, judge],
                      train_dataset=rows, args=args)
trainer.train()
'''


def test_a_notebook_trains_and_its_translation_is_the_same_run(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_judge(tiny.model_dir)
    Path("rows.jsonl").write_text("".join(json.dumps({"n": n, "bonus": n}) + "\n" for n in range(4)))
    ours = {"unsloth": "flatout_migrate.unsloth", "trl": "flatout_migrate.unsloth.trl"}
    Path("run.py").write_text(NOTEBOOK.format(**ours, model=str(tiny.model_dir)))
    with pytest.warns(UserWarning, match="a longer prompt is left out"):
        runpy.run_path("run.py", run_name="__main__")
    theirs = NOTEBOOK.format(unsloth="unsloth", trl="trl", model=str(tiny.model_dir))
    cells = ["!pip install unsloth\n%env A=1\n", "%%bash\nls\n", theirs]
    parts = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    Path("run.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["# GRPO"]}, *parts]}))
    words = ["rollout.rounds=2", "run_dir=converted", "model.precision=fp32"]
    assert main(["convert", "run.ipynb", "--to", "out.yaml", *words]) == 0
    assert main(["train", "out.yaml"]) == 0
    ran, read = (flatout.load(name).log for name in ("outputs", "converted"))
    assert [step.loss for step in read.steps] == [step.loss for step in ran.steps]
    assert [record.reward for record in read.rounds] == [record.reward for record in ran.rounds]
    # the reward model's scores are those of TRL's way: texts of its template, without special tokens, padded right
    answers = [one for number in (1, 2) for one in flatout.load("converted").rollouts(number).answers]
    judge = AutoModelForSequenceClassification.from_pretrained("judge")
    tokenizer = AutoTokenizer.from_pretrained("judge")
    chats = [[*asked(one.prompt), {"role": "assistant", "content": one.answer}] for one in answers]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    read = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    scores = judge.eval()(**read).logits[:, 0].tolist()
    assert [one.rewards["model"] for one in answers] == pytest.approx(scores, abs=1e-6)
    assert len({*scores}) > 4


def asked(prompt: str) -> list[dict[str, str]]:
    """The turns of the notebook's prompt, which is shown as text."""
    (question,) = re.findall(r"What is \d\?", prompt)
    system = "Answer in\n<answer>...</answer>"
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def write_judge(base: Path, folder: str = "judge", **told: Any) -> None:
    """Write a model with one random score, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    config = AutoConfig.from_pretrained(base, num_labels=1, **{"pad_token_id": tokenizer.pad_token_id, **told})
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_rewards_that_would_score_otherwise_are_refused(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_judge(tiny.model_dir)
    (line_break,) = AutoTokenizer.from_pretrained(tiny.model_dir).encode("\n")  # ends a chat
    write_judge(tiny.model_dir, "padded", pad_token_id=line_break)
    two_scores = AutoModelForSequenceClassification.from_pretrained(tiny.model_dir, num_labels=2)
    chats = [{"prompt": [{"role": "user", "content": "Hi."}]}]
    for reward, rows, why in (
        (lambda completions: [1.0], chats, "has no name at the top of the script"),
        ("org/judge", chats, "org/judge.* read from a folder"),
        (two_scores, chats, "num_labels=1"),
        ("./padded", chats, "give both one pad_token"),
        ("./judge", [{"prompt": "Hi."}], "make prompts chats"),
    ):
        with pytest.raises(FlatoutError, match=f"reward_funcs: .*{why}"):
            GRPOTrainer(str(tiny.model_dir), reward, train_dataset=rows)
    args = GRPOConfig(max_steps=1, per_device_train_batch_size=8, max_completion_length=4)
    (named,) = GRPOTrainer(str(tiny.model_dir), ["./judge"], args, chats)._settings()["rollout"]["rewards"]
    assert named == {"kind": "model", "path": "./judge"}
