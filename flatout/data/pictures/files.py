"""The files of pictures in a store: each once in a shard, and which of them changed since the build."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from flatout.data.columns import PICTURES
from flatout.data.pictures.processor import Picture
from flatout.errors import DataError, ResourceError, SecurityError, counted
from flatout.io.allowed import require_allowed
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import read_as

PICTURE_FILES = "picture_files.json"
"""A file beside the columns of a store: each picture file's size, time of its last change in ns, and xxh3-128."""
Files = dict[str, tuple[int, int, str]]
_MOST_BYTES = 1 << 30
_AS_READ_THEN = "its pictures are those that were read then: `data build --replace` reads them again"


def files_of(pictures: Iterable[Picture]) -> Files:
    """Return what a store remembers of the files that pictures were read from."""
    files = [picture.file for picture in pictures if picture.file.path]
    return {file.path: (len(file.content), file.mtime_ns, file.digest.hex()) for file in files}


def changed_pictures(folder: Path) -> tuple[str, str]:
    """Return which picture files of the store in `folder` have other content now, and what is known of all of them.

    The first is empty if none has. A file with another time is read; if its content is the same, the store takes over
    its time. What is gone cannot be compared.
    """
    try:
        known = read_as(Files, folder / PICTURE_FILES, DataError, max_bytes=_MOST_BYTES)
    except (DataError, OSError):
        return "", _AS_READ_THEN  # pictures in the rows alone, or a build of an earlier version
    changed, touched, num_unknown = list[str](), Files(), 0
    for path, (size, mtime_ns, digest) in known.items():
        try:
            status = Path(path).stat()
            if (status.st_size, status.st_mtime_ns) == (size, mtime_ns):
                continue
            is_other = status.st_size != size or not stat.S_ISREG(status.st_mode)
            if not is_other:
                require_allowed(path)
                is_other = xxhash.xxh3_128_hexdigest(Path(path).read_bytes()) != digest
            changed += [path] * is_other
            touched[path] = (size, status.st_mtime_ns, digest)
        except (OSError, ValueError, SecurityError):
            num_unknown += 1
    if changed:
        files = counted(len(changed), "picture file")
        return f"{files} of {len(known):,} changed, such as {changed[0]}", ""
    if touched:
        with suppress(ResourceError):
            DurableIO().write_json(folder / PICTURE_FILES, known | touched)
    return "", _AS_READ_THEN if num_unknown else "its picture files are unchanged"


class PictureFiles:
    """Where the files of an open shard's pictures begin; `end` is where the next one will."""

    def __init__(self, end: int) -> None:
        self._places: dict[bytes, int] = {}
        self._end = end

    def columns(self, samples: Sequence[Sequence[Picture]]) -> dict[str, NDArray[Any]]:
        pictures, new, starts = [picture for own in samples for picture in own], list[bytes](), list[int]()
        for file, _ in pictures:
            if file.digest not in self._places:
                self._places[file.digest] = self._end
                new.append(file.content)
                self._end += len(file.content)
            starts.append(self._places[file.digest])
        values: dict[str, Any] = {
            "num_pictures": [len(own) for own in samples],
            "picture_heights": [file.height for file, _ in pictures],
            "picture_widths": [file.width for file, _ in pictures],
            "picture_tokens": [standing.num_tokens for _, standing in pictures],
            "picture_values": [standing.num_values for _, standing in pictures],
            "picture_hashes": [int.from_bytes(file.digest[:8]) for file, _ in pictures],
            "picture_starts": starts,
            "picture_sizes": [len(file.content) for file, _ in pictures],
            "picture_bytes": np.frombuffer(b"".join(new), np.uint8),
        }
        return {name: np.array(values[name], column.stored) for name, column in PICTURES.items()}


def picture_hashes(columns: Mapping[str, NDArray[Any]], num_samples: int) -> list[bytes]:
    """Return the hashes of each sample's pictures as bytes, which are empty without any."""
    if "num_pictures" not in columns:
        return [b""] * num_samples
    ends = np.cumsum(columns["num_pictures"])[:-1]
    return [hashes.tobytes() for hashes in np.split(columns["picture_hashes"], ends)]
