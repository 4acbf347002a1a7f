"""Writes a column into a finished token store, such as what another model says of every sample."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from flatout.data.columns import (
    COLUMNS,
    PREFIX_TOKENS,
    Column,
    Layout,
    Per,
    check_column,
    check_prefixes,
    fingerprint,
    npy_header,
)
from flatout.data.token_store import MANIFEST, TokenStore, read_manifest
from flatout.io.durable_io import DurableIO
from flatout.io.file_lock import locked

# the file of a column that was written into a finished store
_OF_CONTENT = re.compile(r"[a-z][a-z0-9_]*-[0-9a-f]{16}\.npy")


def add_column(
    folder: Path,
    name: str,
    values: NDArray[Any],
    *,
    per: Per,
    meaning: str,
    partial: bool = False,
    durable_io: DurableIO | None = None,
    replaces: Callable[[Mapping[str, Column]], Collection[str]] = lambda _: (),
) -> TokenStore:
    """Write a column into a finished store, and return the store with it; one of the same name is replaced.

    `values` [number of tokens, samples or units, as `per` says] have one of the types of `Column`. The column is in the
    store whole or not at all, whenever a write ends; open stores keep what they read. Those of the store's columns that
    `replaces` returns leave it; no other process changes them meanwhile. Raises DataError for values that do not fit,
    UsageError for a column that `check_column` refuses, and ResourceError if the disk is full.
    """
    dtype: Any = values.dtype.name
    column = Column(dtype, per, meaning, partial=partial)
    durable_io = durable_io or DurableIO()
    with locked(folder.with_name(f".{folder.name}.lock"), f"the process that builds {folder}"):
        store, manifest = TokenStore.open(folder), read_manifest(folder)
        layout = Layout({**manifest.columns, name: check_column(name, column)}, manifest.shards)
        values = column.checked(name, values, layout.items(name).stop)
        if name == PREFIX_TOKENS:
            units = store.unit_offsets
            sizes = np.ones(store.num_samples, np.int64) if units is None else np.diff(units)
            check_prefixes(store.token_ids, store.loss_mask, store.offsets, sizes, values)
        shards = []
        for index, shard in enumerate(manifest.shards):
            part = values[layout.items(name, index)].view(np.uint8)
            shards.append(replace(shard, xxh3={**shard.xxh3, name: xxhash.xxh3_128_hexdigest(part.data)}))
        mark = fingerprint(name, column, shards)
        # a file of its own for each content, so that the manifest's one rename decides
        column = replace(column, fingerprint=mark, file=f"{name}-{mark[:16]}.npy")
        if manifest.columns.get(name) == column:
            return store
        durable_io.remove_tree(folder / column.file)  # of a write that a crash ended
        content = [memoryview(npy_header(column, len(values))), values.view(np.uint8).data]
        durable_io.create(folder / column.file, content, sum(map(len, content)))
        gone = {*replaces(manifest.columns)} - {*COLUMNS, name}
        columns = {one: own for one, own in manifest.columns.items() if one not in gone} | {name: column}
        manifest = replace(manifest, columns=columns, shards=tuple(shard.without(gone) for shard in shards))
        durable_io.write_json(folder / MANIFEST, asdict(manifest))
        files = {own.file for own in columns.values()}
        for path in folder.iterdir():
            if _OF_CONTENT.fullmatch(path.name) and path.name not in files:
                durable_io.remove_tree(path)
    return TokenStore.open(folder)
