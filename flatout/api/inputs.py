"""Data, models and tokenizers in memory, written to files: every rank and a resumed run read the same ones."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from flatout.errors import DataError, FlatoutError, UsageError
from flatout.io.durable_io import DurableIO, digest
from flatout.io.file_lock import locked

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def data_file(data: Any, folder: Path) -> str:
    """Return the path of a file with the rows of `data`, named by its content; a path or hub id is returned as it is.

    `data` is a datasets.Dataset, a pandas or pyarrow table (parquet), or an iterable of rows, each a mapping of JSON
    values (JSON Lines). Raises DataError for a row that is not, UsageError for anything else, and ResourceError.
    """
    if isinstance(data, str | Path):
        return str(data)
    kind = f"{type(data).__module__.partition('.')[0]}.{type(data).__name__}"
    if kind in ("datasets.DatasetDict", "datasets.IterableDatasetDict"):
        raise UsageError(f"data: it has the splits {', '.join(data)}; pass one of them, such as data[{next(iter(data))!r}]")
    durable_io = DurableIO()
    durable_io.make_dir(folder)
    half_done = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        with durable_io.resource_errors("write", folder):
            suffix = _write_rows(data, kind, half_done)
            target = folder / f"{digest(half_done).xxh3[:16]}{suffix}"
            half_done.replace(target)
    finally:
        half_done.unlink(missing_ok=True)
    return str(target)


def _write_rows(data: Any, kind: str, path: Path) -> str:
    """Write rows to a new file; return the suffix for its format."""
    if kind == "datasets.Dataset":
        data.to_parquet(str(path))
        return ".parquet"
    if kind in ("pandas.DataFrame", "pyarrow.Table"):
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pandas(data, preserve_index=False) if kind == "pandas.DataFrame" else data
        pyarrow.parquet.write_table(table, path)
        return ".parquet"
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise UsageError(
            f"data is a {type(data).__name__}; expected a path, a datasets.Dataset, a pandas or pyarrow table, or rows"
        )
    with path.open("x", encoding="utf-8") as file:
        for number, row in enumerate(data, start=1):
            if not isinstance(row, Mapping):
                raise DataError(f"data: row {number} is a {type(row).__name__}; expected a mapping such as {{'text': ...}}")
            try:
                file.write(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n")
            except (TypeError, ValueError) as error:
                raise DataError(f"data: row {number}: {error}; use text, numbers, lists and mappings only") from error
    return ".jsonl"


def model_source(model: PreTrainedModel, folder: Path) -> str:
    """Return what `model.name` should be for a model in memory: where it was loaded from if it is unchanged, else a
    folder that it is written to, named by its content.

    Raises UsageError for a PEFT model, a model without all weights in memory, or one that was quantized while loading.
    """
    from transformers import PreTrainedModel

    from flatout.models.export import publish_model

    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"model is a {type(model).__name__}; pass a name, a folder or a transformers model; to go on from an "
            "adapter, save it and set lora.continue_from"
        )
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise UsageError("model has weights that are not in memory (device_map offloaded them); pass its name instead")
    origin = model.name_or_path
    if origin and _equals_files(model, origin):
        return origin
    if getattr(model, "quantization_method", None) is not None:
        raise UsageError(
            f"model was quantized when it was loaded; pass its name ({origin}) and base.storage: nf4 or fp8 instead"
        )
    target = folder / f"model-{_fingerprint(model)}"
    with locked(folder / ".models.lock", "the process that writes this model"):
        if not target.exists():
            publish_model(model, None, target)
    return str(target)


def tokenizer_folder(tokenizer: Any, folder: Path) -> str:
    """Return a folder with this tokenizer, named by its content; a name or folder is returned as it is."""
    if isinstance(tokenizer, str | Path):
        return str(tokenizer)
    if not hasattr(tokenizer, "save_pretrained"):
        raise UsageError(f"tokenizer is a {type(tokenizer).__name__}; pass a name, a folder or a transformers tokenizer")
    durable_io = DurableIO()
    durable_io.make_dir(folder)
    half_done = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        with durable_io.resource_errors("write", folder):
            tokenizer.save_pretrained(half_done)
            content = xxhash.xxh3_128()
            for file in sorted(path for path in half_done.rglob("*") if path.is_file()):
                content.update(str(file.relative_to(half_done)).encode() + file.read_bytes())
            target = folder / f"tokenizer-{content.hexdigest()[:16]}"
            if not target.exists():
                half_done.rename(target)
    finally:
        durable_io.remove_tree(half_done)
    return str(target)


def _fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of a model's configuration and weights."""
    content = xxhash.xxh3_128(model.config.to_json_string(use_diff=False).encode())
    for name, tensor in sorted(model.state_dict().items()):
        content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content.update(_bytes_of(tensor))
    return content.hexdigest()[:16]


def _bytes_of(tensor: Any) -> memoryview:
    import torch

    return memoryview(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())


def _equals_files(model: PreTrainedModel, origin: str) -> bool:
    """Whether every weight of a model equals the one in the files it was loaded from, in the model's dtype."""
    from safetensors import safe_open

    from flatout.models.load.source import weight_files

    own, seen = model.state_dict(), set()
    try:
        files = weight_files(origin, None)
    except FlatoutError:  # the files are gone, or the hub does not answer
        return False
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                if name not in own:
                    return False
                if not tensors.get_tensor(name).to(own[name].dtype).equal(own[name].detach().cpu()):
                    return False
                seen.add(own[name].data_ptr())
    # tied weights are in the files once
    return bool(seen) and all(tensor.data_ptr() in seen for tensor in own.values())
