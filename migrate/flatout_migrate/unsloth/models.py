"""Unsloth's `FastLanguageModel`: what a run needs to know of a model, and the trained model after it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from flatout import Fix, FlatoutError, Run, UsageError
from flatout.api.data import load_processor, load_tokenizer
from flatout.api.models import copy_model, export_model, find_model, load_model, merge_model
from flatout.api.ranks import this_rank
from flatout.api.settings import read_json
from flatout_migrate.call_arguments import ARGUMENTS, PEFT_DEFAULTS, settings_of

_GGUF = {"fast_quantized": "q8_0", "quantized": "q4_k_m", "not_quantized": "f16"}
# Unsloth's names for parts of models, in the full names of their linear layers
_VISION, _LANGUAGE = ("vision", "image", "visual", "patch"), ("language", "text")
_ATTENTION, _MLP = ("self_attn", "attention", "attn"), ("mlp", "feed_forward", "ffn", "dense")


def _renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"quantization_method" if name == "kind" else name: value for name, value in settings.items()}


class Model:
    """A model by its name, the arguments of all calls about it, and its run once it is trained.

    Any other attribute is that of transformers' model, which is loaded then: the trained one after training.
    """

    def __init__(self, source: Any, device_map: Any = None, **given: Any) -> None:
        """Take a name, folder, adapter or run, or a model in memory. Raises UsageError, CheckpointError."""
        self.source, self.device_map, self.given = source, device_map, given
        self.paths = find_model(str(source)) if isinstance(source, str | Path) else None
        self.run: Run | None = None
        self.loaded: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.loaded is None:
            self.loaded = self._load()
        return getattr(self.loaded, name)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.forward(*inputs, **options)

    def _load(self) -> Any:
        paths = self.paths if self.run is None else find_model(str(self.run.folder))
        if paths is None:
            return self.source
        if self.given.get("load_in_4bit"):
            warnings.warn("answers come from the weights in their files; load_in_4bit is for training", stacklevel=4)
        return load_model(paths, self.device_map)[0]

    def _saved(self) -> Path:
        """Return the folder of the trained adapter or model, or of the adapter that was loaded."""
        if self.run is None and self.paths is not None and self.paths.adapter is not None:
            return self.paths.adapter
        return self.trained().final_dir

    def trained(self) -> Run:
        """Return the run. Raises UsageError before training."""
        if self.run is None:
            raise UsageError("the model is not trained yet; call trainer.train() first")
        return self.run

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Write the trained or loaded adapter (with full_finetuning the model) and its tokenizer, on rank 0."""
        settings_of(options, "save_pretrained")
        source = self._saved()
        if this_rank().is_first:
            copy_model(source, Path(save_directory))

    save_lora = save_pretrained

    def save_pretrained_merged(
        self, save_directory: str | Path, tokenizer: Any = None, save_method: str = "merged_16bit", **options: Any
    ) -> None:
        """Write a plain folder with the adapter merged, in 16 bits, or the adapter alone with "lora"; on rank 0.

        The run's tokenizer is written too. Raises ResourceError for a folder that is not empty.
        """
        settings_of({**options, "save_method": save_method}, "save_pretrained_merged")
        if save_method == "lora":
            return self.save_pretrained(save_directory)
        source = self._saved()
        if this_rank().is_first:
            merge_model(find_model(str(source)), Path(save_directory))

    def save_pretrained_gguf(
        self, save_directory: str | Path, tokenizer: Any = None, quantization_method: str | list[str] = "q8_0"
    ) -> None:
        """Write the merged model as GGUF, for each method into a folder of its name in `save_directory`; on rank 0."""
        methods = [quantization_method] if isinstance(quantization_method, str) else quantization_method
        for name in methods if this_rank().is_first else ():
            try:
                export_model(str(self._saved()), "gguf", Path(save_directory) / name, kind=_GGUF.get(name, name))
            except FlatoutError as error:
                error.fixes = tuple(Fix(_renamed(fix.settings), fix.why) for fix in error.fixes)
                raise

    def push_to_hub(self, repo_id: str, tokenizer: Any = None, token: str = "", private: bool = False) -> None:
        """Push the trained adapter or model with its tokenizer and a card to a new repository, on rank 0."""
        self.push_to_hub_merged(repo_id, tokenizer, "lora", token, private)

    def push_to_hub_merged(
        self,
        repo_id: str,
        tokenizer: Any = None,
        save_method: str = "merged_16bit",
        token: str = "",
        private: bool = False,
    ) -> None:
        """Push the model with its adapter merged, or the adapter alone with "lora", to a new repository, on rank 0."""
        settings_of({"save_method": save_method}, "push_to_hub_merged")
        if token:
            os.environ["HF_TOKEN"] = token
        run = self.trained()
        if this_rank().is_first:
            is_merged = save_method == "merged_16bit" and run.config.method == "lora"
            print(run.push_to_hub(repo_id, merged=is_merged, private=private))

    def push_to_hub_gguf(self, *_: Any, **__: Any) -> None:
        """Raise UsageError: GGUF files are written to a folder, which the hub's own client uploads."""
        raise UsageError("push_to_hub_gguf: call save_pretrained_gguf, then `hf upload REPO FOLDER`")


class FastLanguageModel:
    """Unsloth's entry point: a model and its tokenizer, adapters, and inference."""

    @staticmethod
    def from_pretrained(
        model_name: str, *, device_map: Any = "sequential", token: str | None = None, **given: Any
    ) -> tuple[Model, Any]:
        """Return a model (a name, a folder, an adapter or a run), whose weights are not loaded yet, and its tokenizer.

        With device_map "auto" or "balanced", training uses every visible GPU. Raises ProblemsError, DataError.
        """
        if token is not None:
            os.environ["HF_TOKEN"] = token
        settings_of(given, "from_pretrained")
        is_4bit = not any(given.get(name) for name in ("full_finetuning", "load_in_16bit", "load_in_fp8"))
        model = Model(model_name, device_map, **{"load_in_4bit": is_4bit, "max_seq_length": 2048, **given})
        if model.paths and model.paths.adapter:
            saved = read_json(model.paths.adapter / "adapter_config.json")
            model.given |= {name: saved[name] for name in saved if name in ARGUMENTS}
            model.given["continue_from"] = str(model.paths.adapter)
        tokenizer = load_tokenizer(model.paths.tokenizer if model.paths else model_name, given.get("revision"))
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return model, tokenizer

    @staticmethod
    def get_peft_model(model: Model, **given: Any) -> Model:
        """Train adapters. Raises ProblemsError for arguments that flatout cannot honour."""
        model.given |= given if "continue_from" in model.given else {**PEFT_DEFAULTS, **given}
        settings_of(model.given, "get_peft_model")
        return model

    @staticmethod
    def for_inference(model: Model) -> Model:
        """Return the model, which is ready to answer."""
        return model

    for_training = for_inference


class FastVisionModel(FastLanguageModel):
    """The same for models that read pictures, with their processor in place of the tokenizer."""

    @staticmethod
    def from_pretrained(model_name: str, **given: Any) -> tuple[Model, Any]:
        """Return a model whose weights are not loaded yet, and its processor. Raises ProblemsError, DataError."""
        model, tokenizer = FastLanguageModel.from_pretrained(model_name, **given)
        paths, names = model.paths, ""
        if paths and paths.adapter:
            # its configuration may name layers by their ends alone
            with safe_open(paths.adapter / "adapter_model.safetensors", "pt") as tensors:
                names = " ".join(tensors.keys())
        if given.get("full_finetuning") or any(part in names for part in _VISION):
            model.given["freeze_vision_tower"] = False
        return model, load_processor(paths.base if paths else model_name, tokenizer)

    @staticmethod
    def get_peft_model(
        model: Model,
        *,
        finetune_vision_layers: bool = True,
        finetune_language_layers: bool = True,
        finetune_attention_modules: bool = True,
        finetune_mlp_modules: bool = True,
        target_modules: str | list[str] | None = None,
        **given: Any,
    ) -> Model:
        """Train adapters in the parts that are named, or in `target_modules`. Raises UsageError, ProblemsError."""
        layers = _VISION * finetune_vision_layers + _LANGUAGE * finetune_language_layers
        modules = _ATTENTION * finetune_attention_modules + _MLP * finetune_mlp_modules
        if not layers or not modules:
            parts = "layers (vision, language)" if modules else "modules (attention, mlp)"
            raise UsageError(f"get_peft_model: nothing is trained; set finetune_... of one of the {parts} to True")
        if target_modules is None:
            is_all = finetune_language_layers and finetune_attention_modules and finetune_mlp_modules
            target_modules = "all-linear" if is_all else f".*({'|'.join(layers)}).*({'|'.join(modules)}).*"
        own = {"freeze_vision_tower": not finetune_vision_layers, "target_modules": target_modules}
        return FastLanguageModel.get_peft_model(model, **given, **own)


def is_bfloat16_supported() -> bool:
    """Whether there is a GPU with bfloat16 in hardware."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
