"""What one process found out and a later one need not find out again, as JSON in the user's cache folder.

Facts are found again only under an equal key, so a key must hold everything that they depend on.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from flatout.environment import cache_folder, why_not_private
from flatout.errors import CheckpointError, ResourceError
from flatout.io.durable_io import DurableIO, digest
from flatout.io.json_file import now_utc, read_json

Tell = Callable[[str], object]

PACKAGE = Path(__file__).parents[1]
# files of this package that decide what it computes
_CODE = (".py", ".jinja", ".cu")
# of other packages: a checkout's own is seen only where Python looks into the current folder
_METADATA = re.compile(r"(?!flatout[-.]).*\.(dist|egg)-info")


class KeptFacts(NamedTuple):
    """A JSON object of facts, and when they were found out (ISO 8601, UTC)."""

    facts: Mapping[str, Any]
    when: str


def find_facts(kind: str, key: Mapping[str, Any], tell: Tell = lambda line: None) -> KeptFacts | None:
    """Return the facts of a kind that were kept under an equal key; None if there are none.

    A file that is damaged, or not what `keep_facts` wrote, is told and counts as none.
    """
    path = cache_folder() / "checks" / f"{kind}-{_hash(key)}.json"
    try:
        if (raw := read_own(path)) is None:
            return None
        content = raw["content"]
        if raw["xxh3"] != _hash(content):
            raise CheckpointError(f"{path}: the content does not match its hash")
        kept = KeptFacts(dict(content["facts"]), str(content["when"]))
    except CheckpointError as error:
        tell(f"{error}; this record is ignored")
    except (KeyError, TypeError, ValueError):
        tell(f"{path}: fields are missing; this record is ignored")
    else:
        # of two keys with one hash, the other's facts do not count
        return kept if content.get("key") == json.loads(json.dumps(key)) else None
    return None


def keep_facts(kind: str, key: Mapping[str, Any], facts: Mapping[str, Any], tell: Tell = lambda line: None) -> None:
    """Keep facts under a key; a cache folder that is not writable is told. Raises ValueError for NaN."""
    content = {"key": key, "facts": facts, "when": now_utc()}
    try:
        path = cache_folder() / "checks" / f"{kind}-{_hash(key)}.json"
        write_own(path, {"content": content, "xxh3": _hash(content)})
    except ResourceError as error:
        tell(f"{error}; the next start finds this out again")


def read_own(path: Path) -> Any:
    """Return the JSON of a file in the cache folder that this user has written; None if there is none.

    Raises CheckpointError for a damaged file, and for one that another user could have written.
    """
    try:
        if not path.exists():
            return None
        why = why_not_private(path.parent) or why_not_private(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if why:
        raise CheckpointError(f"{path} is not believed: {why}")
    return read_json(path)


def write_own(path: Path, value: Any) -> None:
    """Write a JSON file into a folder that only this user can write in. Raises ResourceError where that is not so."""
    folder, durable_io = path.parent, DurableIO()
    with durable_io.resource_errors("access", folder):
        # whoever can write here could make this user skip a check
        is_new = not folder.exists()
    durable_io.make_dir(folder)
    with durable_io.resource_errors("make private", folder):
        if folder.stat().st_uid != os.geteuid():
            raise ResourceError(f"{path} is not written: {why_not_private(folder)}")
        if not is_new and why_not_private(folder):
            # what others may have put there would be believed from now on
            for file in folder.glob("*.json"):
                file.unlink()
        folder.chmod(0o700)
    durable_io.write_json(path, value)


def _hash(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, allow_nan=False).encode())


@cache
def code_identity() -> Mapping[str, str]:
    """Return hashes that change with flatout's own code, and with any package that is installed, removed or updated.

    A package counts by the name of its metadata folder, which has its version, and by when that was written. Files of a
    package that are edited in place do not count.
    """
    own = xxhash.xxh3_128()
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in _CODE):
        own.update(f"{path.relative_to(PACKAGE)}\0".encode())
        own.update(path.read_bytes())
    packages = []
    for folder in map(Path, dict.fromkeys(sys.path)):
        with suppress(OSError), os.scandir(folder) as entries:
            named = [entry for entry in entries if _METADATA.fullmatch(entry.name)]
            packages += [(str(folder), entry.name, entry.stat().st_mtime_ns) for entry in named]
    return {"flatout": own.hexdigest(), "packages": _hash(sorted(packages)), "python": sys.version}


def hashes_of(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the xxh3 hash of each file by its name. Raises ResourceError for an unreadable one."""
    hashes = {}
    for name, path in sorted(files.items()):
        try:
            hashes[name] = digest(path).xxh3
        except OSError as error:
            raise ResourceError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error
    return hashes
