"""Keys of rows: of what is stored of a row, for `data.dedupe`, and of the prompts of samples."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from flatout.data.conversation import ParsedRow, PreferenceRow
from flatout.data.encode import TokenizedText
from flatout.data.token_store import TokenStore


def prompt_keys(store: TokenStore) -> NDArray[np.int64]:
    """Return a number for each sample [N], equal where the tokens before the first answer are.

    A sample that begins with its answer, such as a document, has its own.
    """
    hashes, has_prompt = np.zeros(store.num_samples, np.uint64), np.zeros(store.num_samples, np.bool_)
    for index in range(store.num_samples):
        ids, loss_mask = store.sample(index).pair
        first = int(loss_mask.argmax())
        has_prompt[index], hashes[index] = first > 1, xxhash.xxh3_64_intdigest(ids[:first].tobytes())
    keys = np.unique(hashes, return_inverse=True)[1]
    return np.where(has_prompt, keys, len(keys) + np.arange(len(keys)))


def row_key(sample: ParsedRow, pieces: Sequence[TokenizedText]) -> int:
    """Return xxh3-128 of what is stored of a row: token ids, loss masks and pictures, and units with their columns."""
    content = xxhash.xxh3_128(np.array([len(piece.token_ids) for piece in pieces], np.int64).tobytes())
    for piece in pieces:
        content.update(np.ascontiguousarray(piece.token_ids, np.int32).tobytes())
        content.update(piece.loss_mask.tobytes())
        content.update(b"".join(picture.file.digest for picture in piece.pictures))
    if isinstance(sample, PreferenceRow):
        content.update(json.dumps([sample.units, sample.columns], sort_keys=True).encode())
    return content.intdigest()
