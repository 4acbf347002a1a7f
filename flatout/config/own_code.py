"""What a setting names in a person's own Python file: it is run as code, and identified by the file's hash."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from xxhash import xxh3_128_hexdigest

from flatout.config.read import line_of
from flatout.errors import OF_OWN_CODE, UsageError

MAX_FILE_BYTES = 1 << 20


class OwnCode(NamedTuple):
    """A class or function of a person's own file."""

    value: Any
    """None if the file has nothing of this name."""
    name: str
    file: str
    """As the setting names it."""
    digest: str
    """Hash of the file's content."""


def load_own(setting: str, where: str) -> OwnCode:
    """Run the file of `where` (FILE.py:NAME), the value of a setting, and return what has this name in it.

    Raises UsageError for a file that cannot be read or whose own code fails.
    """
    file, _, name = where.rpartition(":")
    path = Path(file)
    try:
        with path.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"{setting}: {file} cannot be read: {reason}; name a file from the folder you start in"
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"{setting}: {file} has more than {MAX_FILE_BYTES:,} bytes; name the file of this code alone")
    digest = xxh3_128_hexdigest(content)
    return OwnCode(getattr(_module(setting, path.absolute(), content, digest), name, None), name, file, digest)


class _Source(SourceLoader):
    """Runs exactly the bytes that were hashed, and leaves no bytecode beside a person's file."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        if str(path) != str(self._path):
            raise OSError("no bytecode")
        return self._content


@lru_cache(maxsize=8)
def _module(setting: str, path: Path, content: bytes, digest: str) -> ModuleType:
    what = setting.partition(".")[0]
    name = f"flatout_{what}_{digest}"
    spec = spec_from_loader(name, _Source(path, content))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # pydantic looks up the types of fields there
    sys.modules[name] = module
    # it may import from its own folder, as a script does
    sys.path.append(folder := f"{path.parent}/")
    try:
        spec.loader.exec_module(module)
    except OF_OWN_CODE as error:
        del sys.modules[name]
        failed = f"the {what}'s own code failed with {type(error).__name__}: {error}"
        raise UsageError(f"{path}{line_of(error, path)}: {failed}") from error
    finally:
        sys.path.remove(folder)
    return module
