"""Sets on the hub by id: `datasets` says which files hold a split, and their rows are read while they are needed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from flatout.config.schema import SourceConfig
from flatout.data.rows.read import row_type, total_rows
from flatout.data.rows.remote import Log, RemoteFile, hub_files, hub_stats
from flatout.errors import DataError, Fix, first_line
from flatout.io.address import Stat
from flatout.io.kept_facts import find_facts, keep_facts

_PINNED = re.compile(r"hf://datasets/[^@]+@([0-9a-f]{40})/?")
_SPLIT_NAME = re.compile(r"\w+([-.]\w+)*")
_CLASS = re.compile(r" *[(][A-Za-z]+Error[)]")
# loaders of `datasets` that read what our readers do; its loader of texts makes a row of each line
_READ_AS_FILES = ("ArrowConfig", "CsvConfig", "JsonConfig", "ParquetConfig")
_NO_OPTIONS = {"name", "version", "data_dir", "data_files", "description", "features"}


@dataclass(frozen=True, slots=True)
class HubSet:
    """A split of a set at one commit: its `files`, or what `datasets` `loaded` where only it can read them.

    `address` is that of the set with its commit; `num_rows` is None if only parsing would tell.
    """

    name: str
    address: str
    files: Sequence[RemoteFile] = ()
    num_rows: int | None = None
    loaded: Any = None


def find_hub_set(source: SourceConfig, log: Log) -> HubSet:
    """Ask the hub which commit the revision of a set is now, and which files hold the split there.

    What it says is kept: where it does not answer later, a set that was built is still known to be the same. Raises
    DataError, and ResourceError if the hub does not send what it has.
    """
    import datasets  # lazy: the import takes a second, and local data does not need it
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    split = source.split or "train"
    name = f"{source.path}[{source.subset + '/' if source.subset else ''}{split}]"
    key = {"hub": constants.ENDPOINT, "split": split, **source.model_dump(include={"path", "subset", "revision"})}
    kept = find_facts("hub-sets", key)
    try:
        builder = datasets.load_dataset_builder(source.path, source.subset, revision=source.revision)
        pinned = _PINNED.match(str(builder.base_path or ""))
        if not pinned and kept:
            raise ConnectionError("`datasets` knows the set from its cache only")
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        answered = isinstance(error, FileNotFoundError | ValueError | RuntimeError | datasets.exceptions.DatasetsError)
        if kept is None or (answered and not isinstance(error, LocalEntryNotFoundError)):
            raise _failure(source, name, error) from error
        reason = _CLASS.sub("", first_line(error))
        log(f"{name}: the hub does not respond ({reason}); what it said on {kept.when} holds")
        return _of_files(source, name, kept.facts, log)
    if pinned and kept and kept.facts["commit"] == pinned[1]:
        return _of_files(source, name, kept.facts, log)
    if pinned and kept:
        log(f"{name}: {source.revision or 'main'} was commit {kept.facts['commit']}, and is {pinned[1]} now")
    if pinned and (addresses := _addresses(builder, split, name, source.path)):
        stats = hub_stats(addresses, log)
        num_rows = total_rows(hub_files(stats, log))
        facts = {"commit": pinned[1], "files": [asdict(stat) for stat in stats], "num_rows": num_rows}
        keep_facts("hub-sets", key, facts)
        return _of_files(source, name, facts, log)
    return _loaded(source, split, name, pinned[1] if pinned else None, log)


def _of_files(source: SourceConfig, name: str, facts: Mapping[str, Any], log: Log) -> HubSet:
    files = hub_files([Stat(**stat) for stat in facts["files"]], log)
    size, many = sum(file.stat.size or 0 for file in files), "s" if files[1:] else ""
    log(f"{name}: commit {facts['commit']}, {len(files)} file{many}, {size / 1e6:,.1f} MB, read while they are needed")
    return HubSet(name, f"hf://datasets/{source.path}@{facts['commit']}", files, facts["num_rows"])


def _addresses(builder: Any, split: str, name: str, path: str) -> list[str]:
    """Return the files of a split; none if only `datasets` can read them as the set's page says. Raises DataError."""
    config = builder.config
    files_of = {str(key): list(files) for key, files in (config.data_files or {}).items()}
    if split not in (*files_of, "all") and _SPLIT_NAME.fullmatch(split):
        fixes = [Fix({"data.sources": [{"path": path, "split": one}]}, "for example") for one in [*files_of][:1]]
        raise DataError(f"{name}: no split {split!r}; it has {', '.join(files_of)}", fixes)
    options, defaults = vars(config), vars(type(config)())
    has_options = any(options[key] != defaults.get(key) for key in options.keys() - _NO_OPTIONS)
    if type(config).__name__ not in _READ_AS_FILES or has_options or split not in files_of:
        return []
    return files_of[split] if all(row_type(PurePath(address)) for address in files_of[split]) else []


def _loaded(source: SourceConfig, split: str, name: str, commit: str | None, log: Log) -> HubSet:
    """Let `datasets` download a set that is not plain files, or open it from its cache if the hub does not respond."""
    import datasets

    try:
        # rows only: `datasets` 4 and later never runs code from the data set's repository
        loaded: Any = datasets.load_dataset(
            source.path, source.subset, split=split, revision=commit or source.revision, streaming=False
        )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _failure(source, name, error) from error
    if not loaded.cache_files:
        raise DataError(f"{name}: `datasets` keeps this data set only in memory; save it to a parquet file and use it")
    # its cache has a folder for each commit
    known = commit or next(iter(re.findall(r"/([0-9a-f]{40})/", loaded.cache_files[0]["filename"])), None)
    log(f"{name}: commit {known or 'not known'}, in the cache of `datasets`")
    address = f"{source.path}@{known}" if known else source.path
    return HubSet(name.replace(source.path, address, 1), address, (), int(loaded.num_rows), loaded)


def _failure(source: SourceConfig, name: str, error: Exception) -> DataError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return DataError(
        f"hub data set {name} (revision {source.revision or 'main'}) cannot be loaded: "
        f"{_CLASS.sub('', ' '.join(lines[:2])) or 'no reason given'}; "
        "There is no local file or folder of that name; check path, subset, split and revision, and log in for a "
        f"private set. If offline, run `hf download {source.path} --repo-type dataset --local-dir DIR` on a "
        "machine with a network and name DIR as the path."
    )
