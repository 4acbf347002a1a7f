"""The demo's files and its configuration: the settings that a user would write into a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.config.schema import Config, DataConfig, SourceConfig

# names in the demo's folder; no question of HELD_OUT_FILE is in TRAIN_FILE
TRAIN_FILE, HELD_OUT_FILE, MODEL_DIR = "train.jsonl", "held_out.jsonl", "model"


def demo_config(folder: Path, seed: int) -> Config:
    """Return the configuration: full training of the tiny model from random weights, 1,875 steps of 8 conversations."""
    return tiny_config(
        folder, seed, {"samples_per_step": 8, "epochs": 3}, {"data": "demo-held-out", "every_steps": 500}
    )


def tiny_config(folder: Path, seed: int, batch: Mapping[str, Any], evaluation: Mapping[str, Any]) -> Config:
    """Return the configuration of a demo in this folder, with these sections `batch` and `eval`."""
    values = {
        "name": "demo",
        "run_dir": folder / "run",
        "seed": seed,
        "method": "full",
        "model": {"name": str(folder / MODEL_DIR), "init": "random"},
        "data": {
            "name": "demo",
            "root": folder / "data",
            "sources": [{"path": str(folder / TRAIN_FILE)}],
            "num_procs": 1,  # for this few rows, starting a second process takes longer than tokenizing
        },
        "batch": batch,
        # training a tiny model from scratch needs 10 times the learning rate of fine-tuning, and a lower beta2
        "optim": {"lr": 3e-3, "beta2": 0.98},
        "schedule": {"kind": "cosine", "warmup_ratio": 0.05},
        "eval": evaluation,
    }
    return Config.model_validate(values)


def held_out_data(config: Config, folder: Path) -> DataConfig:
    """Return the data set that `config.eval.data` names, tokenized like the training data."""
    sources = [SourceConfig(path=str(folder / HELD_OUT_FILE))]
    return config.data.model_copy(update={"name": config.eval.data, "sources": sources})
