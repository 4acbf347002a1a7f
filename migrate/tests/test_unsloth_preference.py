"""Scripts of Unsloth and TRL for preferences, with only the import lines changed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import flatout
from flatout.errors import ProblemsError

# what a notebook for Unsloth does with pairs; {name} is filled in
NOTEBOOK = """
from datasets import Dataset
from flatout_migrate.unsloth import FastLanguageModel, PatchDPOTrainer
from flatout_migrate.unsloth.trl import DPOConfig, DPOTrainer
PatchDPOTrainer()

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name={model!r}, max_seq_length=500, dtype=None, load_in_4bit=False,
)
model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, lora_dropout=0.1, random_state=3407)
trainer = DPOTrainer(
    model=model, ref_model=None, tokenizer=tokenizer, train_dataset=Dataset.from_list({rows!r}), beta=0.3,
    max_length=256, max_prompt_length=128,
    args=DPOConfig(
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, learning_rate=1e-2,
        logging_steps=1, optim="adamw_8bit", weight_decay=0.0, lr_scheduler_type="linear", seed=42,
        output_dir="outputs", report_to="none",
    ),
)
trainer.train()
"""
PAIRS = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": f"It is {n + 1}, I think."} for n in range(4)]


def test_a_notebook_trains_on_pairs(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "__main__"}
    with pytest.warns(UserWarning, match="left out whole"):
        exec(compile(NOTEBOOK.format(model=str(tiny.model_dir), rows=PAIRS), "script.py", "exec"), space)
    config = flatout.load("outputs").config
    assert (config.objective.kind, config.objective.fields) == ("dpo", {"beta": 0.3})
    assert (config.data.max_tokens, config.data.too_long, config.lora.dropout) == (256, "drop", 0.0)
    assert (config.batch.samples_per_step, config.optim.lr) == (4, 1e-2)
    first, last = space["trainer"].state.log_history
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["rewards/margins"] > first["rewards/margins"] == 0.0


# what TRL's page on reward models does
REWARD = """
from peft import LoraConfig
from flatout_migrate.unsloth.trl import RewardConfig, RewardTrainer

trainer = RewardTrainer(
    model={model}, train_dataset={rows!r},
    args=RewardConfig(
        output_dir="judge", max_steps=2, per_device_train_batch_size=2, center_rewards_coefficient=0.01,
        learning_rate=1e-2, report_to="none", max_length=256,
    ), peft_config={peft},
)
trainer.train()
trainer.save_model("saved")
"""
LOADED = "__import__('transformers').AutoModelForSequenceClassification.from_pretrained({!r}, num_labels=1)"


@pytest.mark.parametrize("given", ["a name and adapters", "a model in memory"])
def test_a_reward_model_trains(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    from transformers import AutoModelForSequenceClassification

    monkeypatch.chdir(tmp_path)
    by_name = given == "a name and adapters"
    rows = [{**row, "margin": 0.5} for row in PAIRS] if by_name else PAIRS
    model = repr(str(tiny.model_dir)) if by_name else LOADED.format(str(tiny.model_dir))
    peft = (
        "LoraConfig(r=4, target_modules='all-linear', task_type='SEQ_CLS', modules_to_save=['score'])"
        if by_name
        else "None"
    )
    space: dict[str, Any] = {"__name__": "__main__"}
    with pytest.warns(UserWarning, match="left out whole"):
        exec(compile(REWARD.format(model=model, rows=rows, peft=peft), "script.py", "exec"), space)
    config = flatout.load("judge").config
    fields = {"centering": 0.01, "margin": True} if by_name else {"centering": 0.01}
    assert (config.objective.kind, config.objective.fields) == ("reward", fields)
    assert (config.method, config.optim.lr, config.data.max_tokens) == ("lora" if by_name else "full", 1e-2, 256)
    first, last = space["trainer"].state.log_history
    assert {"accuracy", "margin", "mean_reward"} <= first.keys()
    assert last["loss"] < first["loss"]
    if by_name:
        assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()
    else:
        assert AutoModelForSequenceClassification.from_pretrained("saved").config.num_labels == 1


@pytest.mark.parametrize(
    ("name", "reference", "given", "objective"),
    [
        ("DPO", (None,), {"loss_type": "ipo", "beta": 0.2}, {"kind": "ipo", "beta": 0.2}),
        # TRL's CPOTrainer and ORPOTrainer have no ref_model
        ("CPO", (), {"loss_type": "simpo", "cpo_alpha": 0.0},
         {"kind": "simpo", "beta": 0.1, "gamma": 0.5, "sft_weight": 0.0}),
        ("ORPO", (), {"beta": 0.3}, {"kind": "orpo", "beta": 0.3}),
        ("KTO", (None,), {"undesirable_weight": 2.0}, {"kind": "kto", "beta": 0.1, "undesirable_weight": 2.0}),
        ("Reward", (), {"center_rewards_coefficient": 0.3}, {"kind": "reward", "centering": 0.3}),
    ],
)  # fmt: skip
def test_each_trainer_by_name_and_by_position(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reference: Any, given: Any, objective: Any
) -> None:
    from flatout_migrate.unsloth import trl

    monkeypatch.chdir(tmp_path)
    labels = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in PAIRS]
    rows, lr = labels if name == "KTO" else PAIRS, 1e-4 if name == "Reward" else 1e-6
    config, trainer = getattr(trl, f"{name}Config")(**given), getattr(trl, f"{name}Trainer")
    assert config.learning_rate == lr
    by_position = trainer(str(tiny.model_dir), *reference, config, None, rows)
    settings = by_position._settings()
    assert settings == trainer(str(tiny.model_dir), args=config, train_dataset=rows)._settings()
    assert settings["objective"] == objective
    assert (settings["optim"]["lr"], settings["data"]["max_tokens"], settings["method"]) == (lr, 1024, "full")
    assert by_position.train_dataset.num_rows == len(PAIRS) * (1 if name == "KTO" else 2)
    with pytest.raises(ProblemsError, match="ref_model: the reference is the model before training"):
        trainer(str(tiny.model_dir), args=config, train_dataset=PAIRS, ref_model="org/other")


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    from flatout_migrate.unsloth.trl import DPOConfig

    with pytest.raises(ProblemsError, match=r"(?s)loss_type: 'hinge'.*sync_ref_model: a reference that follows"):
        DPOConfig(loss_type="hinge", sync_ref_model=True)
