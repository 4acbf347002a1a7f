"""The registry of built data sets: `<root>/data_config.json`, a list of entries that a person may edit too."""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flatout.config.schema import NAME_PATTERN
from flatout.data.store import sync_folder
from flatout.data.strict_json import JSONSyntaxError, parse_json
from flatout.errors import DataError, ResourceError, SecurityError

FILE_NAME = "data_config.json"
BUILT_DIR = "built_dataset"


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


_ENTRY = TypeAdapter(Entry)


def built_dir(root: Path, name: str) -> Path:
    """The folder of the data set `name`, `<root>/built_dataset/<name>` (it need not exist).

    Raises SecurityError for a name outside NAME_PATTERN and for a folder that a link leads out of the root.
    """
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise SecurityError(
            f"data set name {name[:80]!r} is refused: use letters, digits, dot, dash and underscore, "
            f"64 at most, starting with a letter or digit"
        )
    return _inside(root, f"{BUILT_DIR}/{name}", name)


def entry_dir(root: Path, entry: Entry) -> Path:
    """The folder of an entry. Raises SecurityError when its `path` leads out of the root."""
    return _inside(root, entry.path, entry.name)


def _inside(root: Path, path: str, name: str) -> Path:
    if "\0" in path or not (root / path).resolve().is_relative_to(root.resolve()):
        raise SecurityError(f"data set {name!r}: path {path!r} leads out of {root}; only folders inside it are used")
    return root / path


def load(root: Path) -> dict[str, Entry]:
    """All entries by name, in file order; empty when there is no registry yet.

    Raises DataError naming file and entry for damaged JSON, a missing or wrong field, or a name given twice;
    SecurityError for a name or path that leads out of the root. Keys that Entry does not know are left alone.
    """
    file = root / FILE_NAME
    entries: dict[str, Entry] = {}
    for number, raw in enumerate(_read(file), start=1):
        entry = _entry_of(raw, f"{file}: entry {number}")
        if entry.name in entries:
            raise DataError(f"{file}: entry {number}: name {entry.name!r} is given twice; remove one")
        built_dir(root, entry.name)
        entry_dir(root, entry)
        entries[entry.name] = entry
    return entries


def find(root: Path, name: str) -> Entry:
    """The entry of that name. Raises DataError with the nearest and all known names when there is none."""
    built_dir(root, name)
    entries = load(root)
    if name in entries:
        return entries[name]
    if not entries:
        raise DataError(f"no data set {name!r}: {root / FILE_NAME} has none; build it with `flatout data build`")
    near = difflib.get_close_matches(name, entries, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise DataError(f"no data set {name!r} in {root / FILE_NAME}; {hint}known: {', '.join(entries)}")


def upsert(root: Path, entry: Entry) -> None:
    """Add the entry, or replace the one of its name in its place; all others are written back as they were.

    Safe against crashes (temporary file, fsync, rename) and against other processes (an exclusive lock on
    `.data_config.lock`, for which it waits). Raises DataError when the file that is there is damaged, ResourceError
    when the new one cannot be written (the old one then stays).
    """
    built_dir(root, entry.name)
    entry_dir(root, entry)
    root.mkdir(parents=True, exist_ok=True)
    file = root / FILE_NAME
    with _locked(root / ".data_config.lock"):
        raws = _read(file)
        places = [index for index, raw in enumerate(raws) if raw.get("name") == entry.name]
        if places:
            raws[places[0]] = asdict(entry)
        else:
            raws.append(asdict(entry))
        _replace(file, json.dumps(raws, indent=2, ensure_ascii=False) + "\n")


def _entry_of(raw: dict[str, Any], place: str) -> Entry:
    try:
        return _ENTRY.validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{place} ({raw.get('name', 'without name')}): {field}: {first['msg'].lower()}") from None


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        raws = parse_json(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return []
    except JSONSyntaxError as error:
        raise DataError(f"{file}:{error.line}:{error.column}: {error.what}; repair it by hand") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    if not isinstance(raws, list):
        raise DataError(f"{file}: expected a list of entries; repair it by hand, or move it away and build again")
    for number, raw in enumerate(raws, start=1):
        if not isinstance(raw, dict):
            raise DataError(f"{file}: entry {number} is no object with a name; remove it")
    return raws


@contextmanager
def _locked(lock_file: Path) -> Iterator[None]:
    with lock_file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when the process ends, however it ends
        yield


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ResourceError(f"{file}: cannot be written: {error.strerror}") from error
    sync_folder(file.parent)
