"""Unsloth's `FastLanguageModel`: remembers what a run needs; weights are only loaded where transformers' own are used."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flatout.api.run import Run
from flatout.compat.translation import (
    Became, Given, RefusedError, Rule, Translation, any_value, each, number, off, only, to, translate,
)  # fmt: skip
from flatout.compat.unsloth.distributed_utils import this_rank
from flatout.data.tokenizer import load_tokenizer
from flatout.environment import set_environment
from flatout.errors import ProblemsError, ResourceError, UsageError
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import read_json
from flatout.models.export import merge, publish_model
from flatout.models.load.inference import NAMED_MAPS, ModelPaths, load_trained, resolve_model_paths
from flatout.models.lora.adapter import ADAPTER_CONFIG
from flatout.parallel.process_group import choose_device

_PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_RECOMPUTE = any_value("recompute: auto keeps what fits in memory; the numerics are the same")
_VLLM = off("export the run for vLLM instead")


def _dtype(given: Given) -> Became:
    name = str(given.value).removeprefix("torch.")
    if name not in ("None", *_PRECISION):
        raise RefusedError(f"{given.value!r:.40} is not supported; write bfloat16, float16, float32 or None")
    return Became({"model.precision": _PRECISION[name]} if name in _PRECISION else {})


def _storage(given: Given) -> Became:
    names = [
        name for name in ("full_finetuning", "load_in_16bit", "load_in_fp8", "load_in_4bit") if given.all.get(name)
    ]
    ours = {"full_finetuning": {"method": "full"}, "load_in_fp8": {"base.storage": "fp8"}}
    return Became({**ours, "load_in_4bit": {"base.storage": "nf4"}}.get(names[0], {}) if names else {})


def _targets(given: Given) -> Became:
    value = given.value if isinstance(given.value, str) or given.value is None else sorted(given.value)
    if value is None or {"embed_tokens", "lm_head"} & set(value):
        raise RefusedError("name linear layers of the decoder, or write all-linear; embeddings and head stay frozen")
    return Became({"lora.targets": value})


MODEL_ARGUMENTS: Mapping[str, Rule] = {
    "max_seq_length": to("data.max_tokens", lambda length: length or None),
    "dtype": _dtype,
    **each("load_in_4bit load_in_16bit load_in_fp8 full_finetuning", _storage),
    "load_in_8bit": off("flatout stores frozen weights in 4 bits or as fp8: write load_in_4bit or load_in_fp8"),
    "revision": to("model.revision"),
    "random_state": to("seed"),
    "trust_remote_code": off("code from model repositories is never run; use a model that transformers knows"),
    "use_gradient_checkpointing": _RECOMPUTE,
    "rope_scaling": off("write it into config.json of the model"),
    "resize_model_vocab": off("embeddings keep their size"),
    "offload_embedding": off("set strategy: fsdp and sharding.offload in a flatout configuration"),
    "float32_mixed_precision": off("adapters are fp32 already; write dtype=torch.float32 for the whole model"),
    **each("fast_inference float8_kv_cache qat_scheme unsloth_tiled_mlp", _VLLM),
    **each("gpu_memory_utilization max_lora_rank disable_log_stats", any_value("only read with fast_inference")),
    **each("fix_tokenizer use_exact_model_name", any_value("names are exact, and the tokenizer is checked")),
}  # fmt: skip
PEFT_ARGUMENTS: Mapping[str, Rule] = {
    "r": to("lora.rank"),
    "lora_alpha": number("lora.alpha"),
    "lora_dropout": number("lora.dropout"),
    "target_modules": _targets,
    "use_rslora": to("lora.rslora"),
    "use_dora": to("lora.dora"),
    "random_state": to("seed"),
    "max_seq_length": to("data.max_tokens"),
    "use_gradient_checkpointing": _RECOMPUTE,
    **each("bias task_type peft_type", only(("none", "CAUSAL_LM", "LORA"), "adapters have no bias, of a causal model")),
    "init_lora_weights": only((True,), "A is random and B zero at the start"),
    "modules_to_save": off("embeddings and head stay frozen; from_pretrained(full_finetuning=True) trains them"),
    **each("layers_to_transform layers_pattern", off("write one regular expression as target_modules")),
    **each("loftq_config qat_scheme target_parameters ensure_weight_tying", off("not supported; remove it")),
    "temporary_location": any_value("nothing is kept on disk meanwhile"),
    "finetune_vision_layers": off("only text models are trained"),
    **each("finetune_language_layers finetune_attention_modules finetune_mlp_modules", only((True,), "name them in target_modules")),
}  # fmt: skip
PEFT_DEFAULTS = {
    "r": 16, "lora_alpha": 16, "random_state": 3407,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip


SAVE_ARGUMENTS: Mapping[str, Rule] = {
    "save_method": only(
        ("merged_16bit", "lora"), "write merged_16bit or lora; for 4 bits use `flatout export --to gguf`"
    ),
    "safe_serialization": only((True,), "only safetensors are written"),
    **each("push_to_hub save_embedding_layers", off("push the run with `flatout push`")),
    **each("max_shard_size temporary_location maximum_memory_usage token", any_value("changes no weight")),
}


class Model:
    """A model by its name, the settings of its run so far, and after training the run.

    Any other attribute is that of transformers' model, which is loaded then: the trained one after training.
    """

    def __init__(self, paths: ModelPaths, device_map: Any = None, source: Any = None) -> None:
        self.paths, self.device_map, self.source = paths, device_map, source
        self.settings = Translation(())
        self.run: Run | None = None
        self.loaded: Any = None

    def with_settings(self, settings: Translation, call: str) -> Translation:
        """Return the model's settings and these. Raises ProblemsError for what flatout lacks, and for contradictions."""
        settings.checked(call)
        told = {name: one for one in self.settings.outcomes if not one.is_default for name in one.settings}
        problems = [
            f"{one.name} sets {name} to {value}, but {told[name].name} sets it to {told[name].settings[name]}; keep one"
            for one in settings.outcomes
            for name, value in one.settings.items()
            if name in told and not one.is_default and name != "data.max_tokens" and told[name].settings[name] != value
        ]
        if problems:
            raise ProblemsError(call, problems)
        kept = (one for one in settings.outcomes if not (one.is_default and one.settings.keys() & told.keys()))
        return Translation((*self.settings.outcomes, *kept))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.loaded is None:
            self.loaded = self._load() if self.source is None or self.run is not None else self.source
        return getattr(self.loaded, name)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.forward(*inputs, **options)

    def _load(self) -> Any:
        if self.settings.flat.get("base.storage"):
            warnings.warn("answers come from weights as in their files; load_in_4bit is for training", stacklevel=4)
        paths = self.paths if self.run is None else resolve_model_paths(str(self.run.folder))
        device, device_map = choose_device("auto", this_rank()), self.device_map
        if isinstance(device_map, Mapping):
            with TemporaryDirectory() as folder:
                DurableIO().write_json(file := Path(folder) / "device_map.json", dict(device_map))
                return load_trained(paths, device=device, device_map=str(file))[0]
        is_spread = device_map in NAMED_MAPS and this_rank().world == 1 and torch.cuda.device_count() > 1
        return load_trained(paths, device=device, device_map=device_map if is_spread else None)[0]

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Write the trained adapter (with full_finetuning the model) and its tokenizer, on rank 0."""
        translate(options, SAVE_ARGUMENTS).checked("save_pretrained")
        source, folder, durable_io = self.trained().final_dir, Path(save_directory), DurableIO()
        if this_rank().is_first:
            with durable_io.resource_errors("write", folder):
                shutil.copytree(source, folder, dirs_exist_ok=True)
            durable_io.sync_tree(folder)

    def save_pretrained_merged(
        self, save_directory: str | Path, tokenizer: Any = None, save_method: str = "merged_16bit", **options: Any
    ) -> None:
        """Write a plain folder with the adapter merged, in 16 bits, or the adapter alone with "lora"; on rank 0.

        The tokenizer is always written. Raises ResourceError for a folder that is not empty.
        """
        translate({**options, "save_method": save_method}, SAVE_ARGUMENTS).checked("save_pretrained_merged")
        if save_method == "lora":
            return self.save_pretrained(save_directory)
        run, folder = self.trained(), Path(save_directory)
        if folder.exists() and any(folder.iterdir()):
            raise ResourceError(f"save_pretrained_merged: {folder} is not empty; choose a different folder")
        if this_rank().is_first:
            model, own = load_trained(resolve_model_paths(str(run.folder)), device=torch.device("cpu"))
            merge(model)
            publish_model(model if model.dtype.itemsize == 2 else model.to(torch.bfloat16), own, folder)

    def _elsewhere(self, *_: Any, **__: Any) -> None:
        folder = self.trained().folder
        raise UsageError(
            f"GGUF files and uploads are made of the run folder: `flatout export {folder} --to gguf --out FOLDER`, "
            f"`flatout push {folder} REPO`"
        )

    save_pretrained_gguf = push_to_hub = push_to_hub_merged = push_to_hub_gguf = _elsewhere

    def trained(self) -> Run:
        """Return the run. Raises UsageError before training."""
        if self.run is None:
            raise UsageError("the model is not trained yet; call trainer.train() first")
        return self.run


class FastLanguageModel:
    """Unsloth's entry point: a model and its tokenizer, adapters, and inference."""

    @staticmethod
    def from_pretrained(
        model_name: str, *, device_map: Any = "sequential", token: str | None = None, **given: Any
    ) -> tuple[Model, Any]:
        """Return a model (a name, a folder, an adapter or a run) and its tokenizer, without loading the weights.

        With device_map "auto" or "balanced", training uses every visible GPU. Raises ProblemsError, DataError.
        """
        if token is not None:
            set_environment({"HF_TOKEN": token})
        others = ("load_in_16bit", "load_in_fp8", "full_finetuning")
        is_4bit = not any(given.get(name) for name in others)
        defaults = {"load_in_4bit": is_4bit, "max_seq_length": 2048}
        model = Model(resolve_model_paths(str(model_name)), device_map)
        settings = translate(given, MODEL_ARGUMENTS, defaults=defaults, nullable=("max_seq_length",))
        model.settings = model.with_settings(settings, "from_pretrained")
        if (adapter := model.paths.adapter) is not None:
            content = read_json(adapter / ADAPTER_CONFIG)
            saved = {name: content[name] for name in PEFT_ARGUMENTS if name in content} | {"from": str(adapter)}
            settings = translate(saved, {**PEFT_ARGUMENTS, "from": to("lora.continue_from")})
            model.settings = model.with_settings(settings, str(adapter))
        tokenizer = load_tokenizer(model.paths.tokenizer, given.get("revision"))
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return model, tokenizer

    @staticmethod
    def get_peft_model(model: Model, **given: Any) -> Model:
        """Train adapters. Raises ProblemsError for arguments that flatout cannot honour."""
        defaults = {} if model.paths.adapter else PEFT_DEFAULTS
        model.settings = model.with_settings(translate(given, PEFT_ARGUMENTS, defaults=defaults), "get_peft_model")
        return model

    @staticmethod
    def for_inference(model: Model) -> Model:
        """Return the model, which is ready to generate."""
        return model

    for_training = for_inference


def is_bfloat16_supported() -> bool:
    """Whether this process computes in bfloat16: on a CPU, or a GPU that has it in hardware."""
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
