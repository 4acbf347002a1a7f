"""What a reference says of a store's samples: a column that runs fill once and keep under a key of what decides it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flatout.config.objective import REFERENCE, REFERENCE_TOKENS
from flatout.data.add_column import add_column
from flatout.data.columns import Column
from flatout.data.token_store import TokenStore
from flatout.errors import DataError, ResourceError

MOST_KEPT = 16
"""References that a data set keeps, the newest; each takes 8 bytes a sample."""
_PREFIX = "reference_"


def with_reference(store: TokenStore, name: str = REFERENCE) -> TokenStore:
    """Return the store with a blank column of the reference in memory, unless a file has it; NaN is not computed yet.

    REFERENCE is float64 (num_samples,), REFERENCE_TOKENS float32 (num_tokens,).
    """
    if name in store.columns and not store.columns[name].partial:
        return store
    meaning = "log-probability of the label tokens by the reference"
    column = Column("float64", "sample", meaning, name, partial=True)
    if is_token := name == REFERENCE_TOKENS:
        column = replace(column, dtype="float32", per="token")
    values = np.full(len(store.token_ids) if is_token else store.num_samples, np.nan, column.stored)
    return replace(store, columns={**store.columns, name: column}, extra={**store.extra, name: values})


def lacks_reference(store: TokenStore, names: Collection[str]) -> bool:
    """Whether a run has to compute some of these columns of the reference."""
    return any(store.columns[name].partial and np.isnan(store.extra[name]).any() for name in names)


def column_of_key(key: str) -> str:
    """Return the name of the column on disk that holds what was computed under this key (hexadecimal digits)."""
    return f"{_PREFIX}{key[:16]}"


def _still_there(store: TokenStore) -> TokenStore | None:
    """Return the store with what others have kept since it was opened; None if its folder has other tokens now."""
    try:
        newer = TokenStore.open(store.folder)
    except DataError:
        if store.folder.exists():
            raise
        return None
    # a view of the store, as KTO's pairs, has a name of its own
    return newer if replace(newer.meta, name=store.meta.name) == store.meta else None


def add_kept(values: NDArray[np.float64], store: TokenStore, key: str) -> None:
    """Put what was kept under a key where values (num_samples,) are NaN. Raises DataError for a damaged store."""
    newer = _still_there(store)
    stored = None if newer is None else newer.extra.get(column_of_key(key))
    if stored is not None:
        np.copyto(values, stored, where=np.isnan(values))


def keep_on_disk(store: TokenStore, key: str, meaning: str) -> list[str]:
    """Keep the values, with those that others have kept meanwhile. Raises ResourceError if the disk is full.

    Of the columns of other keys, the oldest leave the data set, so that MOST_KEPT stay. Returns what these held.
    What the run knows stays as it is: every rank must leave out the same passes, and only one of them keeps values.
    Raises ResourceError if the data set was replaced or removed since it was opened: it then is not changed.
    """
    replaced = ResourceError(f"{store.folder} was replaced or removed after this run had opened it")
    if _still_there(store) is None:
        raise replaced
    values: NDArray[np.float64] = store.extra[REFERENCE].copy()
    add_kept(values, store, key)
    name, gone = column_of_key(key), list[str]()

    def oldest(columns: Mapping[str, Column]) -> list[str]:
        others = [one for one in columns if one.startswith(_PREFIX) and one != name]
        others.sort(key=lambda one: (store.folder / columns[one].file).stat().st_mtime_ns, reverse=True)
        gone.extend(columns[one].meaning for one in others[MOST_KEPT - 1 :])
        return others[MOST_KEPT - 1 :]

    try:
        add_column(store.folder, name, values, per="sample", meaning=meaning, partial=True, replaces=oldest)
    except DataError:
        if _still_there(store) is None:  # in this moment
            raise replaced from None
        raise
    return gone
