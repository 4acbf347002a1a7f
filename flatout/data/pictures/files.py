"""The files of pictures in a store: each once in a shard, with the columns that say which sample has which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.data.pictures.processor import Picture


class PictureFiles:
    """Where the files of an open shard's pictures begin; `end` is where the next one will."""

    def __init__(self, end: int) -> None:
        self._places: dict[bytes, int] = {}
        self._end = end

    def columns(self, samples: Sequence[Sequence[Picture]]) -> dict[str, NDArray[Any]]:
        pictures, new, starts = [picture for own in samples for picture in own], list[bytes](), list[int]()
        for picture in pictures:
            if picture.digest not in self._places:
                self._places[picture.digest] = self._end
                new.append(picture.content)
                self._end += len(picture.content)
            starts.append(self._places[picture.digest])
        return {
            "num_pictures": np.array([len(own) for own in samples], np.int32),
            "picture_heights": np.array([picture.height for picture in pictures], np.int32),
            "picture_widths": np.array([picture.width for picture in pictures], np.int32),
            "picture_tokens": np.array([picture.num_tokens for picture in pictures], np.int32),
            "picture_values": np.array([picture.num_values for picture in pictures], np.int64),
            "picture_hashes": np.array([int.from_bytes(picture.digest[:8]) for picture in pictures], np.uint64),
            "picture_starts": np.array(starts, np.int64),
            "picture_sizes": np.array([len(picture.content) for picture in pictures], np.int64),
            "picture_bytes": np.frombuffer(b"".join(new), np.uint8),
        }


def picture_hashes(columns: Mapping[str, NDArray[Any]], num_samples: int) -> list[bytes]:
    """Return the hashes of each sample's pictures as bytes, which are empty without any."""
    if "num_pictures" not in columns:
        return [b""] * num_samples
    ends = np.cumsum(columns["num_pictures"])[:-1]
    return [hashes.tobytes() for hashes in np.split(columns["picture_hashes"], ends)]
