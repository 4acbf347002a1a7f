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


def add_column(
    folder: Path, name: str, values: NDArray[Any], *, per: Per, meaning: str, durable_io: DurableIO | None = None
) -> TokenStore:
    """Write a column into a finished store, and return the store with it; one of the same name is replaced.

    `values` [number of tokens, samples or units, as `per` says] have one of the types of `Column`. The column is in the
    store whole or not at all, whenever a write ends; open stores keep what they read. Raises DataError for values that
    do not fit, UsageError for a column that `check_column` refuses, and ResourceError if the disk is full.
    """
    dtype: Any = values.dtype.name
    return write_column(folder, name, Column(dtype, per, meaning), values, durable_io=durable_io)


def write_column(
    folder: Path,
    name: str,
    column: Column,
    values: NDArray[Any],
    *,
    durable_io: DurableIO | None = None,
    replaces: Callable[[Mapping[str, Column]], Collection[str]] = lambda _: (),
) -> TokenStore:
    """Write a column as `add_column` does.

    Those of the store's columns that `replaces` returns leave it; no other process changes them meanwhile.
    """
    durable_io = durable_io or DurableIO()
    with locked(folder.with_name(f".{folder.name}.lock"), f"the process that builds {folder}"):
        store, manifest = TokenStore.open(folder), read_manifest(folder)
        column, layout = check_column(name, column), Layout(manifest.columns, manifest.shards)
        values = column.checked(name, values, layout.items(name, column=column).stop)
        if name == PREFIX_TOKENS:
            units = store.unit_offsets
            sizes = np.ones(store.num_samples, np.int64) if units is None else np.diff(units)
            check_prefixes(store.token_ids, store.loss_mask, store.offsets, sizes, values)
        parts = [values[layout.items(name, index, column)] for index in range(len(manifest.shards))]
        hashes = [xxhash.xxh3_128_hexdigest(part.view(np.uint8).data) for part in parts]
        shards = tuple(
            replace(shard, xxh3={**shard.xxh3, name: own}) for shard, own in zip(manifest.shards, hashes, strict=True)
        )
        mark = fingerprint(name, column, shards)
        # a file of its own for each content, so that the manifest's one rename decides
        column = replace(column, fingerprint=mark, file=f"{name}-{mark[:16]}.npy")
        if manifest.columns.get(name) == column:
            return store
        durable_io.remove_tree(folder / column.file)  # of a write that a crash ended
        content = [memoryview(npy_header(column, len(values))), values.view(np.uint8).data]
        durable_io.create(folder / column.file, content, sum(map(len, content)))
        leaving = {*replaces(manifest.columns)} & manifest.columns.keys() - {*COLUMNS, name}
        gone = {one: manifest.columns[one] for one in leaving}
        other_columns = {one: own for one, own in manifest.columns.items() if one not in gone}
        shards = tuple(
            replace(shard, xxh3={one: own for one, own in shard.xxh3.items() if one not in gone}) for shard in shards
        )
        durable_io.write_json(
            folder / MANIFEST, asdict(replace(manifest, columns={**other_columns, name: column}, shards=shards))
        )
        for own in gone.values():
            durable_io.remove_tree(folder / own.file)
        for old in folder.glob(f"{name}-*.npy"):
            if old.name != column.file and re.fullmatch(rf"{name}-[0-9a-f]{{16}}", old.stem):
                durable_io.remove_tree(old)
    return TokenStore.open(folder)
