"""Load a model for generation or merging, with its adapter and tokenizer, on one device or several."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from flatout.config.folders import how_to_finish, is_run_folder
from flatout.config.read import load_values
from flatout.config.schema import ModelConfig
from flatout.errors import CheckpointError, Fix, FlatoutError, ResourceError, UsageError, reason_of
from flatout.io.hub import hub_errors, hub_source, is_folder, is_path
from flatout.io.json_file import read_json
from flatout.models.blocks import decoder_layers
from flatout.models.load.auto_class import is_scoring
from flatout.models.load.model import CANNOT_BUILD, CHOOSE_ANOTHER, library_errors, load_pretrained, read_config
from flatout.models.load.quantized import empty_model
from flatout.models.load.source import check_source
from flatout.models.lora.adapter import apply_adapter
from flatout.models.lora.adapter_file import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, require_files
from flatout.models.lora.plain import share_base
from flatout.models.scoring import NEW_WEIGHT, Scoring, set_padding
from flatout.models.stops import saved_stops, set_stops

FINAL_DIR = "final"
NOT_WRITING = "{} is a model that scores texts and does not write; flatout eval --rows FILE says how often it is right"
NAMED_MAPS = ("auto", "balanced", "sequential")
MAX_FILE_BYTES = 1 << 20
_BASE = Fix({"--base": "FOLDER"}, "where its base model is")


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """A base model (folder or hub id, revision), an adapter folder if any, and where the tokenizer is."""

    base: str
    revision: str | None
    adapter: Path | None
    tokenizer: str


def resolve_model_paths(target: str, *, base: str | None = None, results: str = FINAL_DIR) -> ModelPaths:
    """Resolve a run folder, adapter folder, model folder or hub id; `base` overrides the adapter's base model.

    A run folder has `results`: `final/`, or `best/` (adapter or model), and `config.yaml` (the base model's name and
    revision).
    Raises UsageError (unfinished run, unknown base) or CheckpointError (unreadable adapter_config.json).
    """
    folder, revision = Path(target), None
    try:
        is_run = folder.exists() and is_run_folder(folder)
    except OSError as error:
        raise UsageError(f"{target:.100}: {reason_of(error)}; give a folder or a hub id such as org/model") from error
    if is_run:
        if not (folder / results).is_dir():
            why = f"the run is not finished; {how_to_finish(folder)}"
            why = why if results == FINAL_DIR else f"no evaluation was better than the last; use {FINAL_DIR}/"
            raise UsageError(f"{folder} has no {results}/: {why}")
        file, folder = folder / "config.yaml", folder / results
        if base is None and (folder / ADAPTER_CONFIG).is_file():
            base, revision = _base_of_run(file)
    if not (folder / ADAPTER_CONFIG).is_file():
        name = str(folder) if folder.is_dir() else target
        if base is not None and Path(target).is_dir():  # it would not be used
            raise UsageError(f"base={base}: {target} has no adapter, it is a whole model; leave base out")
        return ModelPaths(base=name, revision=None, adapter=None, tokenizer=name)
    if base is None:
        require_files(folder)
        file = folder / ADAPTER_CONFIG
        content = read_json(file)
        base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
        if not base or not isinstance(base, str):
            raise UsageError(f"{file} does not name a base model; copy the adapter again", [_BASE])
    tokenizer = str(folder) if (folder / "tokenizer_config.json").is_file() else base
    return ModelPaths(base=base, revision=revision, adapter=folder, tokenizer=tokenizer)


def _base_of_run(file: Path) -> tuple[str, str | None]:
    try:
        section = ModelConfig.long_form(load_values(file)["model"])
        base, revision, init = section["name"], section.get("revision"), section.get("init")
        if not isinstance(base, str) or not isinstance(revision, str | None):
            raise TypeError("not text")
    except (FlatoutError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} does not name the run's model (model.name)", [_BASE]) from error
    if init == "random":
        raise UsageError(
            f"{file.parent}: its adapter was trained over random weights (model.init: random), which no file keeps",
            [Fix({"method": "full"}, "keeps what is trained")],
        )
    return base, revision


def _refuse_absent(base: str, adapter: Path) -> None:
    """Raise UsageError if an adapter's base model is a folder that is not there, as after a run was moved."""
    if is_folder(base):
        return
    parents = (*adapter.parents, *adapter.absolute().parents)
    near = next((at / base for at in parents if (at / base / "config.json").is_file()), None)
    if near is not None or is_path(base):
        fix = Fix({"--base": str(near)}) if near else _BASE
        raise UsageError(f"{adapter}: its base model is the folder {base}, which is not here", [fix])


def saved_scoring(adapter: Path) -> Scoring | None:
    """Return what an adapter of PEFT's task SEQ_CLS scores, by the config.json beside it; None for other adapters.

    PEFT writes none: scores then have no names, and no token is known that pads. Raises CheckpointError.
    """
    content = read_json(adapter / ADAPTER_CONFIG)
    if not isinstance(content, dict) or content.get("task_type") != "SEQ_CLS":
        return None
    require_files(adapter)
    try:
        if (adapter / "config.json").is_file():
            config = AutoConfig.from_pretrained(adapter, trust_remote_code=False)
            labels = tuple(str(config.id2label[index]) for index in range(config.num_labels))
            return Scoring(labels, config.get_text_config().pad_token_id)
        with safe_open(adapter / ADAPTER_WEIGHTS, framework="pt") as opened:
            num_scores = opened.get_slice(PREFIX + NEW_WEIGHT).get_shape()[0]
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{adapter}: its config.json or its {NEW_WEIGHT} cannot be read: {reason_of(error)}; copy the adapter again"
        ) from error
    return Scoring(tuple(f"LABEL_{index}" for index in range(num_scores)), None)


def load_trained(
    trained: ModelPaths,
    *,
    device: torch.device,
    device_map: str | None = None,
    sibling: tuple[ModelPaths, PreTrainedModel] | None = None,
    writes: bool = True,
) -> tuple[PreTrainedModel, Any]:
    """Load the model with its adapter, frozen and in eval mode, and its tokenizer.

    With `writes`, a model that scores texts is a UsageError. A `sibling` that has the same base shares its base
    weights. Raises like load_for_inference, and ResourceError for an adapter on a model that does not fit on the mapped
    GPUs.
    """
    scoring, model = saved_scoring(trained.adapter) if trained.adapter else None, None
    if scoring is not None and writes:
        raise UsageError(NOT_WRITING.format(trained.adapter))
    if sibling and (sibling[0].base, sibling[0].revision) == (trained.base, trained.revision):
        model = share_base(sibling[1])
    if model is None:
        if trained.adapter is not None:
            _refuse_absent(trained.base, trained.adapter)
        model = load_for_inference(
            trained.base, revision=trained.revision, device=device, device_map=device_map, scoring=scoring
        )
    if writes and is_scoring(model.config):
        raise UsageError(NOT_WRITING.format(trained.base))
    if trained.adapter is not None:
        # weights that are offloaded are copied to the device that computes with them in each pass
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ResourceError(
                f"{trained.base} does not fit on these GPUs ({describe_devices(model)}), but the adapter needs all "
                "weights on GPUs; use more GPUs, or merge it with flatout merge and chat with the result"
            )
        apply_adapter(model, trained.adapter)
        if stops := saved_stops(trained.adapter):
            set_stops(model, stops)
        model.eval()
    with library_errors(f"{trained.tokenizer} has no usable tokenizer"):
        source, _ = hub_source(trained.tokenizer, None)
        with hub_errors(trained.tokenizer):
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UsageError(f"{trained.tokenizer} has no tokenizer: tokenizer.json is missing or empty; copy it again")
    return model, tokenizer


def load_for_inference(
    name: str,
    *,
    device: torch.device,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device_map: str | None = None,
    scoring: Scoring | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Load a model with transformers' own sdpa attention and cache, frozen, in eval mode.

    With `scoring`, it is one for sequence classification; a `score` that the files lack is drawn by `seed`.
    `dtype` None keeps the files' dtype. `device_map` (see `read_device_map`) spreads the model over several devices
    instead of `device`. Raises like `load_model` and `read_device_map`.
    """
    check_source(name, revision)
    config = read_config(name, revision, "model", scoring)
    with library_errors(CANNOT_BUILD.format(name), CHOOSE_ANOTHER):
        devices = {"": device} if device_map is None else read_device_map(device_map, config)
        model, _ = load_pretrained(name, revision, config, {"dtype": dtype or "auto"}, devices, seed=seed)
    set_padding(model, scoring and scoring.padding_id)
    return model.requires_grad_(False).eval()


def read_device_map(device_map: str, model_config: Any) -> str | dict[str, str | int]:
    """Read and check a device map: one of NAMED_MAPS, or a JSON file of modules to "cpu", a GPU index or "cuda:1".

    `model_config` is transformers' configuration of the model. Raises UsageError with the wrong entry: an unknown
    module, a part of a decoder layer, a missing GPU, or weights that no entry covers.
    """
    if device_map in NAMED_MAPS:
        return device_map
    path = Path(device_map)
    if not path.is_file():
        raise UsageError(f"--device-map: {path} is neither a file nor one of {', '.join(NAMED_MAPS)}")
    entries = read_json(path, UsageError, max_bytes=MAX_FILE_BYTES)
    if not isinstance(entries, dict) or not entries:
        raise UsageError(f'--device-map: {path} must be an object such as {{"model.layers.0": 0}}')
    model = empty_model(model_config, {})
    modules, layers = dict(model.named_modules()), {id(layer) for layer in decoder_layers(model)}
    example = next((name for name in modules if name.endswith(".layers.0")), next(iter(modules)) or "model")
    for name in entries:
        if name not in modules:
            raise UsageError(f"{path}: {name!r} is not a module of this model; names look like {example}")
        parts = name.split(".")
        if any(id(modules[".".join(parts[:end])]) in layers for end in range(1, len(parts))):
            raise UsageError(f"{path}: {name!r} is part of a decoder layer; map whole layers, such as {example}")
    checked = {name: _device(device, f"{path}: {name!r}") for name, device in entries.items()}
    prefixes = tuple(f"{entry}." if entry else "" for entry in checked)
    uncovered = [name for name, _ in model.named_parameters() if not name.startswith(prefixes)]
    if uncovered:
        raise UsageError(f"{path}: no entry covers {uncovered[0]} ({len(uncovered)} weights in total); add its module")
    return checked


def _device(device: Any, where: str) -> str | int:
    if device == "cpu":
        return "cpu"
    index = device
    if isinstance(device, str) and (match := re.fullmatch(r"cuda:(\d+)", device)):
        index = int(match[1])
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise UsageError(f"{where} is on {device!r}; expected cpu, a GPU's index, or cuda:INDEX")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= num_gpus:
        raise UsageError(f"{where} is on GPU {index}, but {num_gpus} are visible")
    return index


def describe_devices(model: PreTrainedModel) -> str:
    """Describe how many modules are on each device, such as `cuda:0: 19 modules, cuda:1: 18 modules`."""
    devices = getattr(model, "hf_device_map", {"": model.device}).values()
    counts = Counter(f"cuda:{device}" if isinstance(device, int) else str(device) for device in devices)
    return ", ".join(f"{device}: {count} module{'s' if count > 1 else ''}" for device, count in sorted(counts.items()))
