"""The demo of rounds: a model that is half taught answers the demo's tasks, and learns from what is right."""

from __future__ import annotations

from pathlib import Path

from flatout.config.schema import Config
from flatout.demo.conversations import sample_tasks
from flatout.demo.settings import tiny_config
from flatout.demo.write import write_rows

PROMPTS_FILE = "prompts.jsonl"
NUM_PROMPTS = 2000
# points of held-out exact match that the rounds have to add
LEAST_RISE = 0.15


def write_tasks(folder: Path, seed: int) -> None:
    """Write tasks with their answers, of which no question is in the demo's training data. Raises as `write_once`."""
    tasks = sample_tasks(NUM_PROMPTS, seed)
    write_rows(folder / PROMPTS_FILE, ({"prompt": question, "answer": answer} for question, answer in tasks.items()))


def first_config(folder: Path, seed: int) -> Config:
    """Return the configuration of the training on conversations, which ends while there is much to learn."""
    return tiny_config(folder, seed, {"samples_per_step": 8, "max_steps": 600}, {"data": "demo-held-out"})


def rounds_config(folder: Path, seed: int, model: Path) -> Config:
    """Return the configuration of GRPO with this model by exact match; an eighth of the prompts is held out."""
    values = {
        "name": "demo-rounds",
        "run_dir": folder / "rounds",
        "seed": seed,
        "method": "full",
        "model": {"name": str(model)},
        "data": {"root": folder / "data", "sources": [{"path": str(folder / PROMPTS_FILE)}]},
        "objective": "grpo",
        "rollout": {"rounds": 96, "prompts": 96, "group": 8, "max_new_tokens": 40, "rewards": ["exact"]},
        "optim": {"lr": 6e-4, "beta2": 0.98},
        "schedule": {"kind": "constant"},
        "eval": {"fraction": 0.125, "every_steps": 24},
    }
    return Config.model_validate(values)
