"""Models and adapters in folders: found, loaded for answers, compared, merged, copied and exported.

find_model(target)  a run, adapter, model folder or hub id as ModelPaths
ModelPaths          base model, its revision, adapter, and where the tokenizer is
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from flatout.api.ranks import this_rank
from flatout.config.folders import is_run_folder
from flatout.config.read import load_config
from flatout.config.spelling import in_python, spelled_for
from flatout.errors import ResourceError
from flatout.io.durable_io import DurableIO
from flatout.models.export import merge, publish_model
from flatout.models.export import merge_adapter as merge_adapter
from flatout.models.load.inference import NAMED_MAPS, load_for_inference, load_trained
from flatout.models.load.inference import ModelPaths as ModelPaths
from flatout.models.load.inference import resolve_model_paths as find_model
from flatout.models.lora.layer import without_adapter
from flatout.parallel.process_group import choose_device
from flatout.rollout.chat import Sampling, answer
from flatout.trainer.resume import load_stopped

if TYPE_CHECKING:
    from flatout.export.write import Exported

__all__ = [
    "ModelPaths", "RunAndBase", "copy_model", "export_model", "find_model", "load_model", "merge_adapter",
    "merge_model",
]  # fmt: skip


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


@dataclass
class RunAndBase:
    """The model of a run, or of a model folder, and its base, loaded to answer."""

    model: Any
    tokenizer: Any
    base: Any
    """The same model, which answers without its adapter; another; or None for a model that no run has trained."""
    note: str = ""
    """What a reader of its answers should know; "" if that is nothing."""

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> RunAndBase:
        """Load a run in any state, or a folder of a model or adapter. Raises CheckpointError, UsageError."""
        is_run, note = is_run_folder(folder), ""
        if is_run and not (folder / "final").is_dir():
            model, tokenizer, step = load_stopped(folder, device)
            note = f"this run is not finished: it answers as it was after step {step:,}"
            is_adapted = load_config(folder / "config.yaml").method == "lora"
        else:
            paths = find_model(str(folder))
            model, tokenizer = load_trained(paths, device=device)
            is_adapted = paths.adapter is not None
        if is_adapted:
            return cls(model, tokenizer, model, note)
        began = load_config(folder / "config.yaml").model if is_run else None
        if began is None or began.init == "random":
            return cls(model, tokenizer, None, note)
        base = load_for_inference(began.name, revision=began.revision, device=device)
        return cls(model, tokenizer, base, note)

    def answer(
        self, messages: Sequence[Mapping[str, str]], *, by_base: bool, max_new_tokens: int, temperature: float | None
    ) -> str:
        """Return the answer to a conversation, and print it while it is generated."""
        model = self.base if by_base else self.model
        adapted = without_adapter(model) if by_base and self.base is self.model else nullcontext()
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": Sampling(temperature), "stream": True}
        with adapted:
            return answer(model, self.tokenizer, list(messages), **options)
