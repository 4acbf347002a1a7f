"""Read the files of an adapter in PEFT's format, ours or PEFT's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from flatout.config.schema import LoraConfig
from flatout.errors import CheckpointError, SecurityError, UsageError, reason_of
from flatout.io.json_file import read_json
from flatout.models.load.source import check_safetensors

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# PEFT's names for the fields of LoraConfig
FIELDS = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "rslora": "use_rslora", "dora": "use_dora"}
# PEFT's name for the A and B of an embedding
EMBEDDING = "lora_embedding_"
ROWS = ".token_adapter.trainable_tokens_delta"
OF_BASE = (".base_layer.weight", ".base_layer.bias")
SUFFIXES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}

# PEFT options that change the numerics in ways flatout does not support, with the values that do not
_PLAIN_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(
        (
            "fan_in_fan_out", "layer_replication", "lora_bias", "use_bdlora", "use_qalora", "alora_invocation_tokens",
        ),
        (None, False, {}, []),
    ),
}  # fmt: skip


class SavedAdapter(NamedTuple):
    """What the files of an adapter say."""

    config: LoraConfig
    """With full module names as targets."""
    tensors: dict[str, Tensor]
    """By PEFT's names."""
    rows: dict[str, list[int]]
    """The ids of trained rows, by module name."""


def read_adapter(folder: Path) -> SavedAdapter:
    """Read an adapter's folder. Raises CheckpointError, SecurityError or UsageError with the file's name."""
    config_file, weights_file = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    require_files(folder)
    check_safetensors(weights_file)
    tensors = load_file(weights_file)
    tail = "." + SUFFIXES["lora_a"]
    names = [name.removeprefix(PREFIX).removesuffix(tail) for name in tensors if name.endswith(tail)]
    config, tokens = _read_adapter_config(config_file, names)
    suffixes = [suffix for attribute, suffix in SUFFIXES.items() if config.dora or attribute != "magnitude"]
    expected = {f"{PREFIX}{name}.{suffix}" for name in names for suffix in suffixes}
    rest = {name.removeprefix(PREFIX) for name in tensors.keys() - expected}
    rows = {name.removesuffix(ROWS): tokens for name in rest if name.endswith(ROWS)}
    if isinstance(tokens, dict):
        # PEFT's keys are endings of names
        rows = {name: next((ids for key, ids in tokens.items() if name.endswith(key)), []) for name in rows}
    saved = {name: _saved_name(name, config) for name in rest if not name.endswith(ROWS)}
    config = config.model_copy(update={"modules_to_save": sorted(filter(None, set(saved.values())))})
    # PEFT stores the frozen weight of an adapted head with the adapter
    of_base = {f"{name}.base_layer.{leaf}" for name in names for leaf in ("weight", "bias")}
    if embeddings := sorted(name for name in tensors if EMBEDDING in name):
        layer = embeddings[0].removeprefix(PREFIX).partition(f".{EMBEDDING}")[0]
        raise UsageError(
            f"{weights_file}: adapters of embeddings are not supported, such as that of {layer}; train without it in "
            "target_modules, or with modules_to_save"
        )
    odd = expected - tensors.keys() | {name for name, module in saved.items() if module is None and name not in of_base}
    if odd:
        raise CheckpointError(f"{weights_file}: {len(odd)} tensors are missing or unknown, such as {min(odd)}")
    return SavedAdapter(config, tensors, dict(sorted(rows.items())))


def require_files(folder: Path) -> None:
    """Raise an error for a folder without PEFT's two files that says which other format it has."""
    if (folder / ADAPTER_CONFIG).is_file() and (folder / ADAPTER_WEIGHTS).is_file():
        return
    if (pickle := folder / "adapter_model.bin").is_file():
        raise SecurityError(
            f"{pickle} is pickled, which can run code when loaded; convert it safely: torch.load(file, "
            f"weights_only=True), then safetensors.torch.save_file to {ADAPTER_WEIGHTS}"
        )
    if (folder / "adapters.safetensors").is_file():
        raise UsageError(
            f"{folder} has an adapter of MLX (adapters.safetensors), whose format flatout does not read; fuse it by "
            "mlx_lm.fuse, and give the folder that it writes"
        )
    absent = next(name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (folder / name).is_file())
    missing = str(folder / absent)
    missing = missing if missing.isprintable() else repr(missing)
    raise CheckpointError(f"{missing} is missing; give a folder with an adapter in PEFT's format")


def _targets_of(names: list[str], parameters: list[str]) -> list[str]:
    """Return the targets of the layers `names` in an adapter file.

    PEFT nests the adapters of an experts module, one level of `base_layer` for each of its `parameters`. The `.weight`
    of a linear layer is equivalent to targeting its module.
    """
    split = [name.rpartition(".") for name in parameters if not name.endswith(".weight")]
    targets = []
    for name in dict.fromkeys(name.replace(".base_layer", "") for name in names):
        # a parameter without a module is of any experts
        leaves = {leaf for path, _, leaf in split if f".{name}".endswith(f".{path or 'experts'}")}
        targets += [f"{name}.{leaf}" for leaf in leaves] or [name]
    return sorted(targets)


def _saved_name(tensor_name: str, config: LoraConfig) -> str | None:
    """Return the module of `modules_to_save` (by endings, as PEFT matches them) that a tensor belongs to, or None."""
    parts = tensor_name.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts))]
    module = next((name for name in names if name.endswith(tuple(config.modules_to_save))), None)
    # with ensure_weight_tying, a tied head is saved without being listed
    return names[-1] if module is None and config.modules_to_save and config.keep_tied and len(names) == 1 else module


def _read_adapter_config(file: Path, names: list[str]) -> tuple[LoraConfig, Any]:
    """Read an adapter_config.json for the layers `names`; also return its trainable_token_indices."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object; copy the adapter again")
    try:
        kind = content.get("peft_type")
        odd = {
            key: content[key] for key, plain in _PLAIN_OPTIONS.items() if key in content and content[key] not in plain
        }
        targets = content.get("target_modules") or content.get("target_parameters")
        if not targets or not isinstance(targets, str | list):
            raise CheckpointError(f"{file}: target_modules is {targets!r:.100}; copy the adapter again")
        if kind != "LORA" or odd:
            problem = f"peft_type is {kind!r}" if kind != "LORA" else f"{odd} is not supported"
            raise UsageError(
                f"{file}: {problem}; only plain LoRA adapters of linear layers and fused experts are supported"
            )
        content = {"lora_dropout": 0.0, "use_rslora": False, "use_dora": False, **content}
        saved = content.get("modules_to_save") or []
        fields = {
            **{ours: content[theirs] for ours, theirs in FIELDS.items()},
            **{name: content.get(name) or {} for name in ("rank_pattern", "alpha_pattern")},
            "modules_to_save": saved,
            "keep_tied": bool(content.get("ensure_weight_tying")) or not saved,
        }
        parameters = content.get("target_parameters") or []
        return LoraConfig(targets=_targets_of(names, parameters), **fields), content.get("trainable_token_indices")
    except ValidationError as error:
        first = error.errors()[0]
        field = FIELDS.get(str(first["loc"][0]), first["loc"][0])
        raise CheckpointError(f"{file}: {field}: {first['msg']}; copy the adapter again") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {reason_of(error)}; copy the adapter again") from error
