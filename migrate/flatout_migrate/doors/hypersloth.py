"""HyperSloth's classes and training: its settings become flatout's, and flatout trains."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator

from flatout import ProblemsError, Run, UsageError, train
from flatout.api.data import data_set_entry, load_tokenizer, open_data_set, render
from flatout.api.settings import Config, expand, make_config
from flatout_migrate.call_arguments import PEFT_DEFAULTS
from flatout_migrate.doors.launched import device
from flatout_migrate.training_arguments import NULLABLE
from flatout_migrate.translation import Translation, read_table, rules_of, translate

# the key of a registry entry under which `hypersloth-build-dataset` writes how it built the data set
HOW = "hypersloth"
# Unsloth's names of the chat templates that flatout has too
TEMPLATES: Mapping[str, str] = read_table("hypersloth")["templates"]


class Settings(BaseModel):
    """A section. Raises ProblemsError for wrong values; unknown names are refused when they are translated."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            texts = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            problems = (text.removeprefix(": Value error, ") for text in texts)
            raise ProblemsError(type(self).__name__, [*problems]) from None


class DataConfig(Settings):
    """Rows of a hub data set (`dataset_name`) or file (`path`), or a data set that was built before (`name`)."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    data_dir: Path = Path("data")
    source_type: Literal["hf", "path"] | None = None
    dataset_name: str | None = None
    path: str | None = None
    dataset_path: str | None = None
    split: str | None = None
    num_samples: int | None = None
    seed: int = 3407
    tokenizer_name: str | None = None
    chat_template: str | None = None
    instruction_part: str | None = None
    response_part: str | None = None
    max_seq_length: int | None = None
    dataset_num_proc: int | None = None
    nproc: int | None = None
    response_only: bool = True
    _is_built: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [source for source in (self.dataset_name, self.path, self.dataset_path) if source]
        if len(given) > 1 or not (given or self.name):
            raise ValueError("give one of dataset_name, path, dataset_path, or the name of a built data set")
        if self.source_type and (self.source_type == "hf") != bool(self.dataset_name):
            raise ValueError("source_type hf goes with dataset_name, and source_type path with path")
        return self

    @classmethod
    def from_dataset_name(cls, name: str, data_dir: str | Path = "data") -> DataConfig:
        """Return a data set of the registry. Raises DataError with the known names if it is not there."""
        entry = data_set_entry(name, Path(data_dir))
        how = entry.get(HOW) or {"tokenizer_name": entry["tokenizer"]}
        built = DataConfig(name=name, data_dir=data_dir, **how)
        built._is_built = True
        return built


class DataConfigHF(DataConfig):
    """A hub data set: 1,000 of its rows."""

    num_samples: int | None = 1000


HFDatasetConfig = PathDatasetConfig = DataConfigShareGPT = DataConfig


class TrainingConfig(Settings):
    """GPUs, and the tokens that have loss."""

    model_config = ConfigDict(extra="forbid")

    gpus: list[int] = [0]
    loss_type: Literal["all", "response_only"] = "response_only"
    chat_template: str | None = None


class FastModelArgs(Settings):
    """The model, and how its frozen weights are stored."""

    model_name: str = "unsloth/gemma-3-4b-it"
    max_seq_length: int | None = None
    load_in_4bit: bool = True
    full_finetuning: bool = False


class LoraArgs(Settings):
    """Adapters."""

    r: int = 8
    lora_alpha: float = 8
    target_modules: list[str] | str = PEFT_DEFAULTS["target_modules"]


class TrainingArgsConfig(Settings):
    """The optimization; takes every name of transformers' TrainingArguments."""

    output_dir: str = "saves/loras/"
    per_device_train_batch_size: int = 8
    learning_rate: float = 2e-4
    gradient_accumulation_steps: int = 16
    warmup_steps: float = 5
    save_total_limit: int = 2
    optim: str = "adamw_8bit"
    weight_decay: float = 0.01
    report_to: str | list[str] = "tensorboard"
    max_seq_len: int | None = None


class RunConfig(Settings):
    """What HyperConfig and OpenSlothConfig have in common. Each section may be a dict."""

    model_config = ConfigDict(extra="forbid")

    data: DataConfig
    fast_model_args: FastModelArgs = FastModelArgs()
    lora_args: LoraArgs | None = LoraArgs()
    pretrained_lora: str | None = None

    def choices(self) -> tuple[list[int], str, str | None]:
        """Return the GPUs, which tokens have loss, and the name of the chat template."""
        raise NotImplementedError

    def translated(self, training: TrainingArgsConfig, gpus: list[int]) -> dict[str, Any]:
        """Return flatout's settings. Raises ProblemsError with everything that is refused."""
        model, lora = self.fast_model_args, self.lora_args
        given = model.model_dump()
        if model.full_finetuning:
            # the defaults of both are on there too, and have no effect
            given |= {} if "load_in_4bit" in model.model_fields_set else {"load_in_4bit": False}
            lora = lora if lora and lora.model_fields_set else None
        elif lora is None:
            raise UsageError("lora_args is None, but full_finetuning is False; set one of them")
        outcomes = translate(given, rules_of("hypersloth/of the model")).outcomes
        outcomes += translate(lora.model_dump() if lora else {}, rules_of("hypersloth/of LoRA")).outcomes
        arguments = {"run_name": PurePath(training.output_dir).name or "run", **training.model_dump()}
        outcomes += translate(arguments, rules_of("hypersloth"), nullable=NULLABLE, num_gpus=len(gpus)).outcomes
        settings = Translation(outcomes).checked(type(self).__name__)
        if self.pretrained_lora is not None:
            settings["lora"]["continue_from"] = self.pretrained_lora
        if device() == "cpu":
            settings["device"] = "cpu"
        return {**settings, "gpus": gpus}

    def to_config(self, training: TrainingArgsConfig) -> Config:
        """Return flatout's configuration. Raises a UsageError that names every setting flatout cannot honor."""
        gpus, loss, template = self.choices()
        settings, data = self.translated(training, gpus), self.data
        loss = loss if data.response_only else "all"
        own: dict[str, Any] = {"root": str(data.data_dir), "loss_type": loss, "tokenizer": data.tokenizer_name}
        own["template"] = chat_template(data, template, data.tokenizer_name or self.fast_model_args.model_name)
        limits = (self.fast_model_args.max_seq_length, training.max_seq_len, data.max_seq_length)
        own |= data_source(data, min(filter(None, limits), default=None), loss, has_template=template is not None)
        if procs := data.dataset_num_proc or data.nproc:
            own["num_procs"] = procs
        if twice := (given := settings.get("data", {})).keys() & own.keys():
            raise UsageError(f"the training arguments set data.{min(twice)}, which the data's own section sets")
        # rows over the limit lose their end, as there; a data set that was built keeps its own policy
        too_long = {"too_long": "truncate"} if "sources" in own else {}
        return make_config({**settings, "data": {**too_long, **given, **own}}, origin=type(self).__name__)


class HyperConfig(RunConfig):
    """Everything except the optimization."""

    training: TrainingConfig = TrainingConfig()

    def choices(self) -> tuple[list[int], str, str | None]:
        where = self.training
        return where.gpus, where.loss_type, where.chat_template or self.data.chat_template


def data_source(data: DataConfig, max_tokens: int | None, loss: str, *, has_template: bool) -> dict[str, Any]:
    """Return where samples come from: a data set that was built and fits this run, or rows to tokenize."""
    path = data.dataset_name or data.path or data.dataset_path
    if path is None:
        return {"name": data.name, **({"max_tokens": max_tokens} if max_tokens else {})}
    name, limit = data.name or expand({"data": path})["data"].get("name", "data"), max_tokens or 32_000
    if data._is_built:
        store = open_data_set(name, data.data_dir)
        if not has_template and store.meta.settings["loss_type"] == loss and int(store.lengths.max()) <= limit:
            return {"name": name}
        # the data set stays as it was built; one of the same rows is built beside it
        name = f"{name[:40]}-{loss}-{limit}"
    sources = [{"path": path, "split": data.split}]
    return {"name": name, "sources": sources, "num_samples": data.num_samples, "seed": data.seed, "max_tokens": limit}


def chat_template(data: DataConfig, name: str | None, tokenizer_name: str) -> str | None:
    """Return flatout's name of a template, None for the tokenizer's own.

    Labels come from its turns. Raises UsageError for one that is not there or does not write the parts that are given.
    """
    template = name and TEMPLATES.get(name, name)
    if template and template not in TEMPLATES.values() and not template.endswith(".jinja"):
        known = f"is not one of {', '.join(TEMPLATES)}, or a .jinja file"
        raise UsageError(f"chat_template: {template!r} {known}; leave it out to use the tokenizer's own")
    markers = {part: getattr(data, part) for part in ("instruction_part", "response_part")}
    if any(markers.values()):
        turns = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]
        text = render(load_tokenizer(tokenizer_name), turns, template)
        for (part, marker), written in zip(markers.items(), re.split("QUESTION|ANSWER", text), strict=False):
            if marker and marker not in written:
                raise UsageError(f"{part}: {marker!r}: the chat template writes {written!r} there; remove it")
    return template


def run_multiprocess_training(gpus: list[int], hyper_config: HyperConfig, training_config: TrainingArgsConfig) -> Run:
    """Train on these GPUs, one process each, also from a notebook; return the finished run. Raises a FlatoutError."""
    hyper_config.training.gpus = gpus
    return train(hyper_config.to_config(training_config))


def setup_envs(config: RunConfig, training_config: TrainingArgsConfig) -> None:
    """Check all settings and print the global batch size."""
    print(f"Global batch size: {config.to_config(training_config).batch.samples_per_step}")
