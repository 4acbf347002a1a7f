"""`flatout convert` on Python scripts, as typed: they are read and never run; conversions.jsonl has what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flatout.cli.main import main
from flatout.config.read import load_config

CANARY = "import os\nopen('CANARY', 'w').close()\n"
SFT = """
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback
from trl import SFTConfig as Arguments, SFTTrainer

NAME, SIZE = "out", 2
OUT = f"{BASE}/run"
BASE = "runs"
LIMIT = 2 * 512
torch.backends.cuda.matmul.allow_tf32 = True
common = dict(bf16=torch.cuda.is_bf16_supported(), fp16=not torch.cuda.is_bf16_supported(), seed=7)

def main():
    model = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path="org/model", dtype=torch.bfloat16,
                                                 device_map="auto", token=secret())
    model.config.use_cache = False
    tokenizer = AutoTokenizer.from_pretrained("org/model", use_fast=True)
    tokenizer.pad_token = tokenizer.eos_token
    train = load_dataset("json", data_files={"train": "chats.jsonl"}, split="train").shuffle(seed=1)
    test = load_dataset("org/chats", "small", split="test[:10%]")
    args = Arguments(OUT, learning_rate=1e-4, per_device_train_batch_size=2, gradient_accumulation_steps=2 * 4,
                     max_length=LIMIT, assistant_only_loss=True, weight_decay=-0.0, **common)
    args.num_train_epochs = 2
    trainer = SFTTrainer(model, args, train_dataset=train, eval_dataset=test, processing_class=tokenizer,
                         peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"],
                                                task_type="CAUSAL_LM"),
                         callbacks=[])
    if True:
        trainer.train()

if __name__ == "__main__":
    main()
"""
SFT_SETTINGS = {
    "run_dir": "runs/run",
    "seed": 7,
    "model": {"name": "org/model"},
    "data": {
        "sources": [{"path": "chats.jsonl"}],
        "loss_type": "response_only",
        "max_tokens": 1024,
        "too_long": "truncate",
    },
    "lora": {"rank": 16, "alpha": 32.0, "targets": ["q_proj", "v_proj"]},
    "batch": {"samples_per_step": 16, "epochs": 2.0},
    "experts": {"balance_loss": "model"},
    "optim": {"lr": 1e-4, "weight_decay": 0.0},
    "schedule": {"warmup_steps": 0},
}
# the same calls, which flatout's own classes of these names run too
RUN_TOO = {
    "unsloth": """
from {unsloth} import FastLanguageModel, is_bfloat16_supported
from {trl} import SFTTrainer
from transformers import TrainingArguments
model, tokenizer = FastLanguageModel.from_pretrained(model_name={model!r}, max_seq_length=500, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, lora_dropout=0, bias="none", random_state=3407)
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset={rows}, max_seq_length=500, packing=False,
    args=TrainingArguments(
        per_device_train_batch_size=2, gradient_accumulation_steps=3, warmup_steps=1, max_steps=3, learning_rate=1e-2,
        optim="adamw_8bit", weight_decay=0.01, lr_scheduler_type="linear", seed=3407, output_dir="outputs",
        report_to="none",
    ),
)
""",
    "dpo": """
from {unsloth} import FastLanguageModel
from {trl} import DPOConfig, DPOTrainer
model, tokenizer = FastLanguageModel.from_pretrained({model!r}, max_seq_length=500, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, lora_dropout=0.1)
trainer = DPOTrainer(
    model=model, ref_model=None, tokenizer=tokenizer, train_dataset={rows}, beta=0.3, max_length=256,
    args=DPOConfig(max_steps=2, learning_rate=1e-2, seed=42, output_dir="outputs"),
)
""",
    "full": """
from {trl} import SFTConfig, SFTTrainer
trainer = SFTTrainer({model!r}, SFTConfig("outputs", max_steps=2, learning_rate=1e-3), train_dataset={rows})
""",
}


def converted(folder: Path, text: str, *words: str, name: str = "sft.py") -> dict[str, Any]:
    """Convert a script that leaves a file when it runs; check that none is there and that the result loads."""
    (folder / name).write_text(text)
    assert main(["convert", str(folder / name), "--to", str(folder / "out.yaml"), *words]) == 0
    assert not Path("CANARY").exists()
    load_config(folder / "out.yaml")
    values = yaml.safe_load((folder / "out.yaml").read_text())
    assert isinstance(values, dict)
    return values


def refused(folder: Path, text: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    (folder / "sft.py").write_text(text)
    assert main(["convert", str(folder / "sft.py"), *words]) == 2
    assert not Path("CANARY").exists()
    return capsys.readouterr().err


def test_a_script_is_read_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert converted(tmp_path, CANARY + SFT) == SFT_SETTINGS
    assert "# CHECK eval_dataset: not evaluated yet" in (tmp_path / "out.yaml").read_text()
    assert "secret" not in capsys.readouterr().out
    # the canary sings when it runs
    exec(compile(CANARY, "sft.py", "exec"), {})
    assert Path("CANARY").exists()


@pytest.mark.parametrize("name", RUN_TOO)
def test_a_script_that_is_read_has_the_settings_of_one_that_is_run(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from flatout.config.read import make_config

    monkeypatch.chdir(tmp_path)
    ours = {"unsloth": "flatout_migrate.unsloth", "trl": "flatout_migrate.unsloth.trl"}
    names = {"model": str(tiny.model_dir), "rows": "None"}
    space: dict[str, Any] = {}
    exec(compile(RUN_TOO[name].format(**ours, **names), "script.py", "exec"), space)
    theirs = space["trainer"]._settings()
    theirs["data"] = {name: value for name, value in theirs["data"].items() if name != "root"}
    names["rows"] = "load_dataset('json', data_files='rows.jsonl')"
    read = converted(tmp_path, CANARY + RUN_TOO[name].format(unsloth="unsloth", trl="trl", **names))
    # of rows without prompt and completion; TRL makes an SFTConfig of TrainingArguments
    source = {} if name == "dpo" else {"loss_type": "all"}
    theirs |= {"experts": {"balance_loss": "model"}} if name == "unsloth" else {}
    theirs["data"] |= {"sources": read["data"]["sources"], **source}
    assert make_config(read).model_dump() == make_config(theirs).model_dump()


def test_the_proposed_command_leaves_out_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"{CANARY}{RUN_TOO['full']}".format(trl="trl", model="org/m", rows="load_dataset('org/chats')")
    text = text.replace("1e-3", "rate()") + "trainer.train_dataset = rows.map(template)\n"
    (tmp_path / "sft.py").write_text(text)
    said = refused(tmp_path, text, capsys)
    step = said.strip().splitlines()[-1].partition("#")[0].split()
    assert step == ["try", "--without", "learning_rate,map"]
    values = converted(tmp_path, text, *step[1:], "optim.lr=3e-4", "data=chats.jsonl")
    assert values["optim"]["lr"] == 3e-4
    # the other rows keep what is translated of the file
    assert values["data"] == {
        "name": "chats", "sources": [{"path": "chats.jsonl"}], "loss_type": "all", "max_tokens": 1024,
        "too_long": "truncate",
    }  # fmt: skip


def test_a_script_that_is_nested_too_deeply_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read as Python" in refused(tmp_path, "-" * 200_000 + "1", capsys)
