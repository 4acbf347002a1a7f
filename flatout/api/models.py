"""Models and adapters in folders: found, loaded for answers, merged, copied and exported.

find_model(target)  a run, adapter, model folder or hub id as ModelPaths
ModelPaths          base model, its revision, adapter, and where the tokenizer is
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from flatout.api.ranks import this_rank
from flatout.config.spelling import in_python, spelled_for
from flatout.errors import ResourceError
from flatout.io.durable_io import DurableIO
from flatout.models.export import merge, publish_model
from flatout.models.export import merge_adapter as merge_adapter
from flatout.models.load.inference import NAMED_MAPS, load_trained
from flatout.models.load.inference import ModelPaths as ModelPaths
from flatout.models.load.inference import resolve_model_paths as find_model
from flatout.parallel.process_group import choose_device

if TYPE_CHECKING:
    from flatout.export.write import Exported

__all__ = ["ModelPaths", "copy_model", "export_model", "find_model", "load_model", "merge_adapter", "merge_model"]


def load_model(paths: ModelPaths, device_map: str | Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Return a frozen model in eval mode with its adapter, and its tokenizer, on this rank's device.

    `device_map` spreads it over devices: a map of modules, or a name such as auto, which one process with several GPUs
    follows. Raises CheckpointError, UsageError, ResourceError.
    """
    device = choose_device("auto", this_rank())
    if isinstance(device_map, Mapping):
        with TemporaryDirectory() as folder:
            DurableIO().write_json(file := Path(folder) / "device_map.json", dict(device_map))
            return load_trained(paths, device=device, device_map=str(file))
    is_spread = device_map in NAMED_MAPS and this_rank().world == 1 and torch.cuda.device_count() > 1
    return load_trained(paths, device=device, device_map=device_map if is_spread else None)


def merge_model(paths: ModelPaths, folder: Path) -> None:
    """Write a model with its adapter merged, in 16 bits, and its tokenizer. Raises ResourceError for a full folder."""
    if folder.exists() and any(folder.iterdir()):
        raise ResourceError(f"{folder} is not empty; choose a different folder")
    model, tokenizer = load_trained(paths, device=torch.device("cpu"))
    merge(model)
    publish_model(model if model.dtype.itemsize == 2 else model.to(torch.bfloat16), tokenizer, folder)


def copy_model(source: Path, folder: Path) -> None:
    """Copy the files of a model or adapter into a folder, and wait until the disk has them. Raises ResourceError."""
    durable_io = DurableIO()
    with durable_io.resource_errors("write", folder):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    durable_io.sync_tree(folder)


@spelled_for(in_python)
def export_model(target: str, to: str, out: Path, *, kind: str | None = None) -> Exported:
    """Write a run, adapter or model for "gguf", "ollama", "vllm" or "mlx"; `kind` is the quantization of a GGUF."""
    from flatout.export.write import export  # lazy: it imports gguf

    return export(target, to, out, kind=kind)
