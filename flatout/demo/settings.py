"""The demo's folder and its configuration: the settings that a user would write into a YAML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatout.config.schema import (
    BatchConfig,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    ScheduleConfig,
    SourceConfig,
)

NUM_TRAIN = 5000
NUM_HELD_OUT = 200


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """The demo's files, all under `root`."""

    root: Path

    @property
    def train_file(self) -> Path:
        """Conversations to train on, JSON lines in OpenAI's form."""
        return self.root / "train.jsonl"

    @property
    def held_out_file(self) -> Path:
        """Conversations whose questions are not in `train_file`."""
        return self.root / "held_out.jsonl"

    @property
    def model_dir(self) -> Path:
        """The tiny model's config.json and tokenizer."""
        return self.root / "model"


def demo_config(folder: DemoFolder, seed: int) -> Config:
    """Return the configuration: full training of the tiny model from random weights, 1,875 steps of 8 conversations."""
    return Config(
        name="demo",
        run_dir=folder.root / "run",
        seed=seed,
        method="full",
        model=ModelConfig(name=str(folder.model_dir), init="random"),
        data=DataConfig(
            name="demo",
            root=folder.root / "data",
            sources=[SourceConfig(path=str(folder.train_file))],
            num_procs=1,  # for this few rows, starting a second process takes longer than tokenizing
        ),
        batch=BatchConfig(samples_per_step=8, epochs=3),
        # training a tiny model from scratch needs 10 times the learning rate of fine-tuning, and a lower beta2
        optim=OptimConfig(lr=3e-3, beta2=0.98),
        schedule=ScheduleConfig(kind="cosine", warmup_ratio=0.05),
        eval=EvalConfig(data="demo-held-out", every_steps=500),
    )


def held_out_data(config: Config, folder: DemoFolder) -> DataConfig:
    """Return the data set that `config.eval.data` names, tokenized like the training data."""
    sources = [SourceConfig(path=str(folder.held_out_file))]
    return config.data.model_copy(update={"name": config.eval.data, "sources": sources})
