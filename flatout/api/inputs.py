"""Data, models and tokenizers in memory, written to files: every rank and a resumed run read the same ones."""

from __future__ import annotations

import base64
import io
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from flatout.config.folders import folder_problem, run_identity
from flatout.data import registry
from flatout.data.conversation import Origin
from flatout.data.pictures.read import require_pillow
from flatout.data.prompt_file import Prompt, shown_prompt
from flatout.errors import DataError, Fix, FlatoutError, UsageError
from flatout.io.durable_io import DurableIO, digest
from flatout.io.file_lock import locked, open_lock, share_lock, take_lock
from flatout.view.open_runs import RUNS, run_folders

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# where a run names its sources
_SETTINGS_FILES = ("config.yaml", "python.yaml")
# mappings that are no settings
SPLITS = ("datasets.DatasetDict", "datasets.IterableDatasetDict")
_NAMES_OF_SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}


def listed_paths(data: Any) -> list[str]:
    """Return the paths of a list or tuple of paths; an empty list for anything else, such as rows or one path."""
    if not (isinstance(data, list | tuple) and all(isinstance(one, str | Path) for one in data)):
        return []
    are_paths = [isinstance(one, Path) or Path(one).suffix or "/" in one for one in data]
    return [str(one) for one in data] if all(are_paths) else []


def refuse_rows(data: Any) -> None:
    """Raise UsageError for a mapping that is no section of settings, but a row, columns of rows, or splits."""
    from flatout.config.data import DataConfig
    from flatout.data.rows.formats.rules import RULES

    if not isinstance(data, Mapping) or not data or data.keys() & DataConfig.model_fields.keys():
        return
    names = [str(name) for name in data]
    if data.keys() <= _NAMES_OF_SPLITS:
        raise UsageError(f"data has the splits {', '.join(names)}; pass one, such as data[{names[0]!r}]")
    if any(data.keys() & rule.columns for rule in RULES.values()):
        row = ", ".join(f"{json.dumps(name)}: ..." for name in names)
        is_row = any(isinstance(value, str) or _is_turn(value) for value in data.values())
        what = "one row" if is_row else f"the columns {', '.join(names)}"
        raise UsageError(f"data is a dict of {what}; rows are a list, also a single one: data=[{{{row}}}]")


def _is_turn(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value)


def kind_of(value: Any) -> str:
    """Return the package and the name of an object's class, such as datasets.Dataset."""
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"


def data_file(data: Any, folder: Path) -> str:
    """Return the path of a file with the rows of `data`, in a folder named by its content; a path is returned as it is.

    `data` is a path or hub id, a datasets.Dataset, a table of pandas, pyarrow or polars (parquet), or an iterable of
    rows, each a mapping of JSON values (JSON Lines). Raises DataError for a row that is not, UsageError for anything
    else.
    """
    if isinstance(data, str | Path):
        return str(data)
    kind = kind_of(data)
    if kind in SPLITS:
        raise UsageError(f"data has the splits {', '.join(data)}; pass one, such as data[{next(iter(data))!r}]")
    # what has Arrow's interface, but no columns, is one column
    is_table = kind == "datasets.Dataset" or (hasattr(data, "__arrow_c_stream__") and hasattr(data, "columns"))
    is_rows = isinstance(data, Iterable) and not isinstance(data, Mapping | bytes)
    if not (is_table or is_rows):
        expected = "a path, a datasets.Dataset, a table of pandas, pyarrow or polars, or rows"
        raise UsageError(f"data is a {type(data).__name__}; expected {expected}")
    name = "rows.parquet" if is_table else "rows.jsonl"
    path = _store(folder, "data", lambda half_done: _write_rows(data, kind, half_done / name))
    _sweep(folder)
    return str(path / name)


# locks that say which copies this process uses, until it ends
_IN_USE: dict[Path, int] = {}


def _sweep(folder: Path) -> None:
    """Remove copies of rows that no data set, no unfinished run of `runs` and no process uses."""
    with locked(folder / ".lock", "another process that writes here"):
        unfinished = [one for one in run_folders(RUNS) if not (one / "final").is_dir()]
        files = [folder.parent / registry.FILE_NAME, *(one / name for one in unfinished for name in _SETTINGS_FILES)]
        named = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())
        for copy in folder.glob("data-*"):
            if copy.name in named or copy in _IN_USE:
                continue
            lock = folder / f".{copy.name}.lock"
            fd = open_lock(lock)
            try:
                if take_lock(fd, lock):
                    DurableIO().remove_tree(copy)
                    DurableIO().remove_tree(lock)
            finally:
                os.close(fd)


def _store(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Fill a new folder by `write` and return where it is: `folder`/NAME-HASH, which stays if it is there already."""
    durable_io, content = DurableIO(), xxhash.xxh3_128()
    half_done = folder / f".{secrets.token_hex(8)}.tmp"
    durable_io.make_dir(half_done)
    try:
        with durable_io.resource_errors("write", folder):
            write(half_done)
        for file in sorted(durable_io.sync_tree(half_done)):
            content.update(f"{file} {digest(half_done / file).xxh3}".encode())
        target = folder / f"{name}-{content.hexdigest()[:16]}"
        with locked(folder / ".lock", "another process that writes here"):
            if not target.exists():
                durable_io.rename(half_done, target)
            if target not in _IN_USE:
                _IN_USE[target] = open_lock(folder / f".{target.name}.lock")
                share_lock(_IN_USE[target])
    finally:
        durable_io.remove_tree(half_done)
    return target


def _data_uri(value: Any) -> str:
    """Return a picture of Pillow's, or the bytes of one's file, as a data URI. Raises TypeError for another value."""
    if isinstance(value, bytes):
        return f"data:;base64,{base64.b64encode(value).decode()}"
    if not type(value).__module__.startswith("PIL."):
        raise TypeError(f"a value is a {type(value).__name__}")
    file, without_loss = io.BytesIO(), "TIFF" if value.mode in ("CMYK", "YCbCr", "LAB") else "PNG"
    try:
        require_pillow().ImageOps.exif_transpose(value).save(file, format=without_loss)
    except (OSError, ValueError) as error:
        mode = "RGBA" if value.has_transparency_data else "RGB"
        raise TypeError(f"a picture has pixels of mode {value.mode}; convert it to {mode}") from error
    return _data_uri(file.getvalue())


def prompts_in_memory(prompts: Any, images: Any, system: str | None) -> list[Prompt]:
    """Return prompts of texts or messages, and of pictures at their marks or before the first question of each.

    `prompts` is one text, one conversation, or a list of these; `images` are the pictures of one prompt, or for each of
    several a picture, a list of them or None. Raises DataError and UsageError.
    """
    if not (system is None or isinstance(system, str)):
        raise UsageError(f"system is {system!r:.60}; expected a text")
    listed = _listed(prompts)
    if listed and all(isinstance(one, Mapping) for one in listed):
        listed = [listed]
    before = [{"role": "system", "content": system}] if system else []
    shown = []
    for number, (one, own) in enumerate(zip(listed, _images_of_each(images, len(listed)), strict=True), start=1):
        turns = [{"role": "user", "content": one}] if isinstance(one, str) else _listed(one)
        if not turns or not all(isinstance(turn, Mapping) for turn in turns):
            raise UsageError(f"prompts: prompt {number} is neither a text nor a list of turns with role and content")
        for place, turn in enumerate(turns, start=1):
            has_content = isinstance(turn.get("content"), str | list | tuple) or turn.get("tool_calls")
            if not (isinstance(turn.get("role"), str) and has_content):
                keys = ", ".join(map(str, turn)) or "no keys"
                raise UsageError(
                    f"prompts: turn {place} of prompt {number} needs role and content, a text or parts; it has {keys}"
                )
        try:
            row = json.loads(json.dumps({"messages": before + turns, "images": own}, default=_path_or_data_uri))
        except (TypeError, ValueError) as error:
            why = f"{error}; give texts, and pictures as paths, bytes or Pillow's images"
            raise UsageError(f"prompts: prompt {number}: {why}") from error
        shown.append(shown_prompt(row["messages"], row, Origin("prompts", number), Path()))
    return shown


def _images_of_each(images: Any, num_prompts: int) -> list[list[Any]]:
    given = [None] * num_prompts if images is None else _listed(images)
    if num_prompts == 1 and not any(one is None or _is_listed(one) for one in given):
        given = [given]
    if len(given) != num_prompts:
        raise UsageError(
            f"images: {len(given)} given for {num_prompts} prompts; give each prompt a picture, a list of them or None"
        )
    return [[] if one is None else _listed(one) for one in given]


def _is_listed(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _listed(value: Any) -> list[Any]:
    return list(value) if _is_listed(value) else [value]


def _path_or_data_uri(value: Any) -> str:
    return os.fsdecode(value) if isinstance(value, os.PathLike) else _data_uri(value)


def _plain(value: Any) -> Any:
    """Return what JSON has for a number or a list of numbers of NumPy or torch; others as `_path_or_data_uri`."""
    is_array = type(value).__module__.partition(".")[0] in ("numpy", "torch") and getattr(value, "ndim", 2) < 2
    return value.tolist() if is_array and hasattr(value, "tolist") else _path_or_data_uri(value)


def _write_rows(data: Any, kind: str, path: Path) -> None:
    number = 0
    if kind == "datasets.Dataset":
        number = len(data)
        data.to_parquet(str(path))
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.Table.from_pandas(data, preserve_index=False) if kind == "pandas.DataFrame" else data
            # by its own method, polars gives types that a file of parquet can hold
            table = data.to_arrow() if hasattr(data, "to_arrow") else pyarrow.table(table)
        except pyarrow.ArrowException as error:  # a column of several types, or of objects
            why = ": ".join(map(str, reversed(error.args)))
            raise DataError(f'data: {why}; pass a list of rows, such as data=data.to_dict("records")') from error
        number = len(table)
        pyarrow.parquet.write_table(table, path)
    else:
        with path.open("x", encoding="utf-8") as file:
            for number, row in enumerate(data, start=1):
                file.write(_json_of(row, number) + "\n")
    if not number:
        raise DataError('data has no rows; give at least one, such as {"instruction": "Say hi", "output": "Hi"}')


def _json_of(row: Any, number: int) -> str:
    """Return a row of JSON Lines. Raises DataError for what is no mapping of texts, numbers, lists and mappings."""
    if isinstance(row, str):
        raise DataError(f'data: row {number} is a text; write rows such as {{"text": {json.dumps(row[:40])}}}')
    if not isinstance(row, Mapping):
        shown = '{"messages": [...]}' if _is_turn(row) else "a dict"
        raise DataError(f"data: row {number} is a {type(row).__name__}; expected a mapping, such as {shown}")
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain).encode().decode()
    except (TypeError, ValueError) as error:
        only = "use text, numbers, lists and mappings only, and paths, bytes or Pillow's images for pictures"
        raise DataError(f"data: row {number}: {error}; {only}") from error


def model_source(model: PreTrainedModel, folder: Path) -> str:
    """Return what `model.name` should be for a model in memory: where it was loaded from if it is unchanged, else a
    folder that it is written to, named by its content.

    Raises UsageError for a model with an adapter of PEFT, without all weights in memory, or quantized while loading,
    and for a folder that a run may not have.
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
    # PEFT puts its layers into the model that it is given
    if any(module.__module__.startswith("peft.") for module in model.modules()):
        raise UsageError(
            "model has layers of a PEFT adapter in it; pass its name, or what merge_and_unload() of the PEFT model "
            "returns; to go on from an adapter, save it and set lora.continue_from"
        )
    origin = str(model.name_or_path)
    if origin and _equals_files(model, origin):
        return origin
    if getattr(model, "quantization_method", None) is not None:
        fixes = [Fix({"model": origin, "base.storage": storage}) for storage in ("nf4", "fp8")]
        raise UsageError("model was quantized when it was loaded; pass its name", fixes)
    if problem := folder_problem(folder, folder / "data", origin or "-", ()):
        raise UsageError(str(problem), problem.fixes)
    run_identity(folder)
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
        raise UsageError(f"tokenizer is a {type(tokenizer).__name__}; pass a name, folder or transformers tokenizer")
    return str(_store(folder, "tokenizer", tokenizer.save_pretrained))


def _fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of a model's configuration and weights."""
    import torch

    content = xxhash.xxh3_128(model.config.to_json_string(use_diff=False).encode())
    for name, tensor in sorted(model.state_dict().items()):
        content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content.update(memoryview(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()))
    return content.hexdigest()[:16]


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
