"""OpenSloth's classes and training: its settings become flatout's, and flatout trains."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from flatout.api.run import Run
from flatout.api.start import train
from flatout.compat import hypersloth
from flatout.compat.hypersloth import LoraArgs, Settings, TrainingArgsConfig, run_settings, with_data
from flatout.config.schema import Config
from flatout.errors import UsageError


class DatasetConfigBase(hypersloth.DataConfig):
    """Rows to train on."""

    response_only: bool = True
    nproc: int | None = None


HFDatasetConfig = PathDatasetConfig = DatasetConfigBase


class FastModelArgs(hypersloth.FastModelArgs):
    """The model, and how its frozen weights are stored."""

    model_name: str
    max_seq_length: int | None = 4096


TrainingArguments = TrainingConfig = TrainingArgsConfig


class OpenSlothConfig(Settings):
    """Everything except the optimization. Each section may be a dict."""

    model_config = ConfigDict(extra="forbid")

    data: DatasetConfigBase
    devices: list[int] = [0]
    fast_model_args: FastModelArgs
    lora_args: LoraArgs | None = LoraArgs()
    pretrained_lora: str | None = None
    sequence_packing: bool = True
    log_level: Literal["info", "debug"] = "info"

    def to_config(self, training: TrainingArgsConfig) -> Config:
        """Return flatout's configuration. Raises a UsageError that names every setting flatout cannot honor."""
        if self.log_level == "debug":
            raise UsageError("log_level: debug is not supported; the run's train.log and events.jsonl have it all")
        model, data = self.fast_model_args, self.data.model_copy(update={"dataset_num_proc": self.data.nproc})
        settings = run_settings(model, self.lora_args, self.pretrained_lora, training, self.devices)
        loss_type = "response_only" if data.response_only else "all"
        return with_data(settings, data, loss_type, [model.max_seq_length, training.max_seq_len])


def run_mp_training(gpus: list[int], opensloth_config: OpenSlothConfig, training_config: TrainingArgsConfig) -> Run:
    """Train on these GPUs, one process each, also from a notebook; return the finished run. Raises a FlatoutError."""
    if not opensloth_config.sequence_packing:
        print("sequence_packing=False: packed samples never see each other, so the results are those without packing")
    opensloth_config.devices = gpus
    return train(opensloth_config.to_config(training_config))


def setup_envs(opensloth_config: OpenSlothConfig, training_config: TrainingArgsConfig) -> None:
    """Check all settings, and print the global batch size. Raises as `OpenSlothConfig.to_config`."""
    print(f"Global batch size: {opensloth_config.to_config(training_config).batch.samples_per_step}")
