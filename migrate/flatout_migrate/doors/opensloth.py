"""OpenSloth's classes and training: its settings become flatout's, and flatout trains."""

from __future__ import annotations

from typing import Literal

from flatout import Run, train
from flatout_migrate.doors import hypersloth
from flatout_migrate.doors.hypersloth import DataConfig, LoraArgs, RunConfig, TrainingArgsConfig, setup_envs

DatasetConfigBase = HFDatasetConfig = PathDatasetConfig = DataConfig
TrainingArguments = TrainingConfig = TrainingArgsConfig
__all__ = ["DatasetConfigBase", "HFDatasetConfig", "LoraArgs", "PathDatasetConfig", "TrainingArguments", "setup_envs"]


class FastModelArgs(hypersloth.FastModelArgs):
    """The model, and how its frozen weights are stored."""

    model_name: str
    max_seq_length: int | None = 4096


class OpenSlothConfig(RunConfig):
    """Everything except the optimization."""

    fast_model_args: FastModelArgs
    devices: list[int] = [0]
    sequence_packing: bool = True
    log_level: Literal["info"] = "info"

    def choices(self) -> tuple[list[int], str, str | None]:
        return self.devices, "response_only", self.data.chat_template


def run_mp_training(gpus: list[int], opensloth_config: OpenSlothConfig, training_config: TrainingArgsConfig) -> Run:
    """Train on these GPUs, one process each, also from a notebook; return the finished run. Raises a FlatoutError."""
    if not opensloth_config.sequence_packing:
        print("sequence_packing=False: packed samples never see each other, so the results are those without packing")
    opensloth_config.devices = gpus
    return train(opensloth_config.to_config(training_config))
