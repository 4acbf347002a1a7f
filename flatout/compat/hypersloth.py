"""HyperSloth's classes and training: its settings become flatout's, and flatout trains."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator

from flatout.api.run import Run
from flatout.api.start import train
from flatout.compat.training_arguments import NULLABLE, TRAINING_ARGUMENTS
from flatout.compat.translation import Became, Rule, Translation, any_value, each, off, only, renamed, to, translate
from flatout.config.read import make_config
from flatout.config.schema import Config
from flatout.data import registry
from flatout.data.token_store import TokenStore
from flatout.environment import environment
from flatout.errors import DataError, ProblemsError, UsageError
from flatout.io.json_file import read_json

# the key of a registry entry under which `hypersloth-build-dataset` writes how it built the data set
HOW = "hypersloth"
# tokens per sample unless a limit is given
NO_LIMIT = 32_000
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Unsloth's names of the chat templates that flatout has too
TEMPLATES = {name: name for name in ("chatml", "mistral", "zephyr", "alpaca", "gemma", "llama-3", "qwen3")} | {
    "llama3": "llama-3", "qwen-3": "qwen3", "gemma2": "gemma", "gemma3": "gemma", "gemma-3": "gemma",
    "phi-3": "phi", "phi-3.5": "phi", "phi-35": "phi",
}  # fmt: skip


MODEL_ARGUMENTS: Mapping[str, Rule] = {
    "model_name": to("model.name"),
    "max_seq_length": any_value("data.max_tokens"),
    "load_in_4bit": lambda given: Became({"base.storage": "nf4"} if given.value else {}),
    "load_in_8bit": off("int8 is not supported; set load_in_4bit=True"),
    "full_finetuning": lambda given: Became({"method": "full"} if given.value else {}),
    "use_gradient_checkpointing": lambda given: Became(
        {"recompute": "auto" if given.value == "unsloth" else "full" if given.value else "none"}
    ),
}
LORA_ARGUMENTS: Mapping[str, Rule] = {
    **renamed("r lora_alpha lora_dropout use_rslora target_modules"),
    **each("finetune_attention_modules finetune_mlp_modules", only((True,), "list target_modules instead")),
    "finetune_language_layers": only((True,), "there are no other layers to train"),
    "finetune_vision_layers": off("vision layers are not supported"),
    "bias": only(("none",), "adapters have no bias"),
    "random_state": only((3407,), "one seed decides adapters, order and dropout; set seed of the training arguments"),
}
OWN_ARGUMENTS: Mapping[str, Rule] = {
    "save_only_model": any_value("checkpoints always hold what resuming needs"),
    "dataset_num_proc": to("data.num_procs"),
    "max_seq_len": any_value("data.max_tokens"),
}


class Settings(BaseModel):
    """A section. Raises ProblemsError for wrong values; unknown names are refused when they are translated."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            raise ProblemsError(type(self).__name__, problems) from None


class DataConfig(Settings):
    """Rows of a hub data set (`dataset_name`) or file (`path`), or a data set that was built before (`name` alone).

    Labels come from the turns of the chat template; `instruction_part` and `response_part` must be what it writes.
    """

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
        entry = registry.find(Path(data_dir), name)
        entries = read_json(Path(data_dir) / registry.FILE_NAME, DataError)
        how = next(one.get(HOW) for one in entries if one["name"] == name) or {"tokenizer_name": entry.tokenizer}
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
    lora_dropout: float = 0.0
    target_modules: list[str] | str = TARGETS


class TrainingArgsConfig(Settings):
    """The optimization; takes every name of transformers' TrainingArguments."""

    output_dir: str = "saves/loras/"
    per_device_train_batch_size: int = 8
    learning_rate: float = 2e-4
    gradient_accumulation_steps: int = 16
    num_train_epochs: float = 1
    warmup_steps: float = 5
    save_total_limit: int = 2
    optim: str = "adamw_8bit"
    weight_decay: float = 0.01
    seed: int = 42
    report_to: str | list[str] = "tensorboard"
    max_seq_len: int | None = None


class HyperConfig(Settings):
    """Everything except the optimization. Each section may be a dict."""

    model_config = ConfigDict(extra="forbid")

    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    fast_model_args: FastModelArgs = FastModelArgs()
    lora_args: LoraArgs | None = LoraArgs()
    pretrained_lora: str | None = None

    def to_config(self, training: TrainingArgsConfig) -> Config:
        """Return flatout's configuration. Raises a UsageError that names every setting flatout cannot honor."""
        model, where = self.fast_model_args, self.training
        settings = run_settings(model, self.lora_args, self.pretrained_lora, training, where.gpus)
        data = self.data.model_copy(update={"chat_template": where.chat_template or self.data.chat_template})
        return with_data(settings, data, where.loss_type, [model.max_seq_length, training.max_seq_len])


def run_settings(
    model: FastModelArgs, lora: LoraArgs | None, pretrained: str | None, training: TrainingArgsConfig, gpus: list[int]
) -> dict[str, Any]:
    """Return flatout's settings. Raises ProblemsError with everything that is refused."""
    given = model.model_dump()
    if model.full_finetuning:
        # the defaults of both are on there too, and have no effect
        given |= {} if "load_in_4bit" in model.model_fields_set else {"load_in_4bit": False}
        lora = lora if lora and lora.model_fields_set else None
    elif lora is None:
        raise UsageError("lora_args is None, but full_finetuning is False; set one of them")
    adapters = lora.model_dump() if lora else {}
    outcomes = [*translate(given, MODEL_ARGUMENTS).outcomes, *translate(adapters, LORA_ARGUMENTS).outcomes]
    rules = {**TRAINING_ARGUMENTS, **OWN_ARGUMENTS}
    outcomes += translate(training.model_dump(), rules, nullable=NULLABLE, num_gpus=len(gpus)).outcomes
    settings = Translation(tuple(outcomes)).checked(type(training).__name__)
    if pretrained is not None:
        settings["lora"]["continue_from"] = pretrained
    # transformers and accelerate read this variable too
    if environment().get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        settings["device"] = "cpu"
    return {"name": as_name(training.output_dir), **settings, "gpus": gpus}


def with_data(settings: dict[str, Any], data: DataConfig, loss_type: str, limits: Sequence[int | None]) -> Config:
    """Return the configuration; the lowest of `limits` is the maximum of tokens per sample.

    Raises UsageError for a template that flatout does not have, and for markers that the template does not write.
    """
    template = data.chat_template and TEMPLATES.get(data.chat_template, data.chat_template)
    if template is not None and template not in TEMPLATES.values() and not template.endswith(".jinja"):
        raise UsageError(
            f"chat_template: {template!r} is not one of {', '.join(TEMPLATES)}, or a .jinja file; leave it out to use "
            "the tokenizer's own"
        )
    tokenizer = data.tokenizer_name or settings["model"]["name"]
    _require_markers(data, template, tokenizer)
    max_tokens = min(filter(None, [*limits, data.max_seq_length]), default=None)
    path = data.dataset_name or data.path or data.dataset_path
    own: dict[str, Any] = {"name": data.name or as_name(str(path)), "tokenizer": tokenizer, "template": template}
    own |= {"root": str(data.data_dir), "loss_type": loss_type}
    own |= {"num_procs": data.dataset_num_proc} if data.dataset_num_proc else {}
    if path is None:
        own |= {"max_tokens": max_tokens} if max_tokens else {}
    elif not (data._is_built and template is None and _fits(data, loss_type, max_tokens or NO_LIMIT)):
        own |= {"sources": [{"path": path, "split": data.split}], "num_samples": data.num_samples, "seed": data.seed}
        own |= {"max_tokens": max_tokens or NO_LIMIT}
        if data._is_built:
            # the data set stays as it was built; one of the same rows is built beside it
            own["name"] = as_name(f"{own['name']}-{loss_type}-{max_tokens or NO_LIMIT}")
    given = settings.get("data", {})
    if twice := given.keys() & own.keys():
        raise UsageError(f"the training arguments set data.{min(twice)}, which the data's own section sets; keep one")
    return make_config({**settings, "data": {**given, **own}}, origin="settings")


def _fits(data: DataConfig, loss_type: str, max_tokens: int) -> bool:
    """Whether a built data set has this loss and no longer sample."""
    store = TokenStore.open(registry.entry_dir(data.data_dir, registry.find(data.data_dir, str(data.name))))
    return store.meta.settings["loss_type"] == loss_type and int(store.lengths.max()) <= max_tokens


def _require_markers(data: DataConfig, template: str | None, tokenizer_name: str) -> None:
    """Raise UsageError for an instruction_part or response_part that the template does not write there."""
    names = [name for name in ("instruction_part", "response_part") if name in data.model_fields_set]
    if not any(getattr(data, name) for name in names):
        return
    from flatout.data.templates.template import choose_template
    from flatout.data.tokenizer import load_tokenizer

    chosen = choose_template(load_tokenizer(tokenizer_name), template, tokenizer_name)
    text = chosen.render([{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}])
    written = dict(zip(("instruction_part", "response_part"), re.split("QUESTION|ANSWER", text), strict=False))
    for name in names:
        if (marker := getattr(data, name)) not in written[name]:
            here = f"the chat template writes {written[name]!r} there, and labels come from its turns"
            raise UsageError(f"{name}: {marker!r}: {here}; remove it")


def as_name(text: str) -> str:
    """Return a name that flatout allows for runs and data sets, from the last part of a path or id."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(text).name).strip("-._")[:64] or "run"


def run_multiprocess_training(gpus: list[int], hyper_config: HyperConfig, training_config: TrainingArgsConfig) -> Run:
    """Train on these GPUs, one process each, also from a notebook; return the finished run. Raises a FlatoutError."""
    hyper_config.training.gpus = gpus
    return train(hyper_config.to_config(training_config))


def setup_envs(hyper_config: HyperConfig, training_config: TrainingArgsConfig) -> None:
    """Check all settings, and print the global batch size. Raises as `HyperConfig.to_config`."""
    print(f"Global batch size: {hyper_config.to_config(training_config).batch.samples_per_step}")
