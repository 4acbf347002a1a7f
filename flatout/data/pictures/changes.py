"""Which picture files have other content than when a data set was built from them."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import xxhash
from pydantic import TypeAdapter

from flatout.data.pictures.processor import Picture
from flatout.errors import DataError, ResourceError, SecurityError, counted
from flatout.io.allowed import require_allowed
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import read_json, validated

PICTURE_FILES = "picture_files.json"
"""A file beside the columns of a store: each picture file's size, time of its last change in ns, and xxh3-128."""
Files = dict[str, tuple[int, int, str]]
_FILES = TypeAdapter(Files)
_MOST_BYTES = 1 << 30
_AS_READ_THEN = "its pictures are those that were read then: `data build --replace` reads them again"


def files_of(pictures: Iterable[Picture]) -> Files:
    """Return what a store remembers of the files that pictures were read from."""
    return {
        picture.path: (len(picture.content), picture.mtime_ns, picture.digest.hex())
        for picture in pictures
        if picture.path
    }


def changed_pictures(folder: Path) -> tuple[str, str]:
    """Return which picture files of the store in `folder` have other content now, and what is known of all of them.

    The first is empty if none has. A file with another time is read; if its content is the same, the store takes over
    its time. What is gone cannot be compared.
    """
    try:
        known = validated(_FILES, read_json(folder / PICTURE_FILES, DataError, max_bytes=_MOST_BYTES), "", DataError)
    except (DataError, OSError):
        return "", _AS_READ_THEN  # pictures in the rows alone, or a build of an earlier version
    changed, touched, num_unknown = list[str](), Files(), 0
    for path, (size, mtime_ns, digest) in known.items():
        try:
            status = Path(path).stat()
            if (status.st_size, status.st_mtime_ns) == (size, mtime_ns):
                continue
            if status.st_size != size or not stat.S_ISREG(status.st_mode) or _digest(path) != digest:
                changed.append(path)
            touched[path] = (size, status.st_mtime_ns, digest)
        except (OSError, ValueError, SecurityError):
            num_unknown += 1
    if changed:
        files = counted(len(changed), "picture file")
        return f"{files} of {len(known):,} changed, such as {changed[0]}", ""
    if touched:
        with suppress(ResourceError):
            keep_files(folder, known | touched)
    return "", _AS_READ_THEN if num_unknown else "its picture files are unchanged"


def keep_files(folder: Path, files: Mapping[str, tuple[int, int, str]]) -> None:
    """Write what a store remembers of its picture files. Raises ResourceError."""
    DurableIO().write_json(folder / PICTURE_FILES, files)


def _digest(path: str) -> str:
    require_allowed(path)
    return xxhash.xxh3_128_hexdigest(Path(path).read_bytes())
