"""The registry of built data sets: `<root>/data_config.json`, a list of entries that users may edit too."""

from __future__ import annotations

import difflib
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flatout.config.schema import NAME_PATTERN, DataConfig
from flatout.data.token_store import MANIFEST, TokenStore
from flatout.errors import DataError, Fix, SecurityError
from flatout.io.durable_io import DurableIO
from flatout.io.file_lock import locked
from flatout.io.json_file import read_json, validated
from flatout.io.near_path import did_you_mean, files_of_rows

FILE_NAME, BUILT = "data_config.json", "built_dataset"


@dataclass(frozen=True, slots=True)
class Entry:
    """One built data set. `path` is its folder, relative to the root; `created` is UTC, ISO 8601."""

    name: str
    path: str
    sources: tuple[str, ...]
    num_samples: int
    tokenizer: str
    template: str | None
    loss_type: str
    fingerprint: str
    created: str


def entry_of(config: DataConfig, store: TokenStore) -> Entry:
    """Return the entry of a data set that is opened or built now."""
    return Entry(
        name=config.name,
        path=str(store.folder.relative_to(config.root)),
        sources=store.meta.sources,
        num_samples=store.num_samples,
        tokenizer=store.meta.tokenizer,
        template=store.meta.template or None,
        loss_type=config.loss_type,
        fingerprint=store.meta.fingerprint,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def own_paths(root: Path) -> tuple[Path, Path]:
    """Return the registry's file in a root, and the folder of all data sets."""
    return root / FILE_NAME, root / BUILT


def built_dir(root: Path, name: str) -> Path:
    """Return the folder of the data set `name`, `<root>/built_dataset/<name>` (it may not exist yet).

    Raises SecurityError for a name outside NAME_PATTERN, and for a folder that a link leads out of the root.
    """
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise SecurityError(
            f"data set name {name[:80]!r} is invalid: use letters, digits, dot, dash and underscore, "
            f"at most 64, starting with a letter or digit"
        )
    return _inside(root, f"{BUILT}/{name}", name)


def entry_dir(root: Path, entry: Entry) -> Path:
    """Return the folder of an entry. Raises SecurityError if its `path` leads out of the root."""
    return _inside(root, entry.path, entry.name)


def _inside(root: Path, path: str, name: str) -> Path:
    if "\0" in path or not (root / path).resolve().is_relative_to(root.resolve()):
        raise SecurityError(f"data set {name!r}: path {path!r} is outside {root}; only folders inside it are allowed")
    return root / path


def load(root: Path) -> dict[str, Entry]:
    """Return all entries by name, in file order; empty if there is no registry yet.

    Raises DataError naming file and entry for damaged JSON, a missing or wrong field, or a duplicate name;
    SecurityError for a name or path that leads out of the root. Keys that Entry does not have are ignored and kept.
    """
    file = root / FILE_NAME
    entries: dict[str, Entry] = {}
    for number, raw in enumerate(_read(file), start=1):
        entry = validated(Entry, raw, f"{file}: entry {number} ({raw.get('name', 'without name')})", DataError)
        if entry.name in entries:
            raise DataError(f"{file}: entry {number}: name {entry.name!r} is given twice; remove one")
        built_dir(root, entry.name)
        entry_dir(root, entry)
        entries[entry.name] = entry
    return entries


def find(root: Path, name: str) -> Entry:
    """Return the entry of that name, or of a store that is there without one, as somebody else may have written it.

    Raises DataError with the nearest and all known names if there is none.
    """
    if not Path(name).suffix:  # a file is named below
        built_dir(root, name)
    entries = load(root)
    if name in entries:
        return entries[name]
    if re.fullmatch(NAME_PATTERN, name) and (built_dir(root, name) / MANIFEST).is_file():
        return entry_of(DataConfig(root=root, name=name), TokenStore.open(built_dir(root, name), verify=False))
    rows, stem = files_of_rows() or ["chats.jsonl"], Path(name).stem
    if Path(name).suffix and (suggestion := did_you_mean(name)):
        raise DataError(f"{name}: no such file, and no data set of that name{suggestion}")
    if Path(name, "config.json").is_file():
        raise DataError(f"{name} is a model, not data; name a file, such as {rows[0]}")
    if Path(name).exists():
        build = f"build one with `flatout data build {name} --tokenizer Qwen/Qwen3-0.6B --name {stem}`"
        advice = f"`flatout data show {stem}` shows the set of that name" if stem in entries else build
        raise DataError(f"{name} contains rows and is not a built data set; {advice}")
    built_dir(root, name)
    example = [Fix({"data": [*entries, *rows][0]}, "for example")]
    if name == "default":  # no data was named
        raise DataError("no data is named", example)
    if not entries:
        raise DataError(
            f"no data set {name!r}, and no file of that name: {root / FILE_NAME} lists no data set; name a file, or "
            f"build one with `flatout data build {rows[0]} --tokenizer Qwen/Qwen3-0.6B --name {name}`",
            example,
        )
    near = difflib.get_close_matches(name, entries, n=1, cutoff=0.7)
    known = (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(entries)}"
    raise DataError(f"no data set {name!r} in {root / FILE_NAME}; {known}", [] if near else example)


def upsert(root: Path, entry: Entry, extra: dict[str, Any] | None = None) -> None:
    """Add the entry, with `extra` keys, or replace the one of the same name; others are written back unchanged.

    Waits for other processes that write it. Raises DataError if the existing file is damaged, ResourceError if the new
    one cannot be written (the old one is then kept).
    """
    built_dir(root, entry.name)
    entry_dir(root, entry)
    file = root / FILE_NAME
    with locked(root / ".data_config.lock", "the process that writes the registry"):
        raws = _read(file)
        index = next((i for i, raw in enumerate(raws) if raw.get("name") == entry.name), len(raws))
        raws[index : index + 1] = [{**asdict(entry), **(extra or {})}]
        DurableIO().write_json(file, raws)


def _read(file: Path) -> list[dict[str, Any]]:
    if file.parent.exists() and not file.parent.is_dir():
        raise DataError(f"{file.parent}: is a file, not a folder of data sets")
    if not file.exists():
        return []
    raws = read_json(file, DataError)
    if not isinstance(raws, list):
        raise DataError(f"{file}: expected a list of entries; repair it by hand, or move it away and build again")
    for number, raw in enumerate(raws, start=1):
        if not isinstance(raw, dict):
            raise DataError(f"{file}: entry {number} is not an object with a name; remove it")
        if "text_field" in raw and "fingerprint" not in raw:
            why = "was written by HyperSloth, whose data sets hold text without turns"
            raise DataError(f"{file}: entry {number} {why}; move this file away and build the data sets again")
    return raws
