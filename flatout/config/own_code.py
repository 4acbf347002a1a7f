"""Code in a person's own file, named FILE.py:NAME in a setting: read and hashed, and run where a run may run code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from xxhash import xxh3_128_hexdigest

from flatout.environment import studio_folders
from flatout.errors import OF_OWN_CODE, DataError, FlatoutError, SecurityError, UsageError, is_of_a_collective

MAX_FILE_BYTES = 1 << 20
# how to keep what a script has from starting its run again
APART = 'move {} to a file of its own, or put the call under if __name__ == "__main__"'
_loading = list[str]()


@contextmanager
def own_code_errors(path: Path, what: str, end: str = "") -> Iterator[None]:
    """Raise what the code of a person's file raises in the block as a UsageError that names its line.

    Memory that runs out, faults of a GPU, and ranks that are lost in a collective stay as they are: they are no mistake
    of the code, and a restart may help.
    """
    try:
        yield
    except (UsageError, DataError) as error:
        raise error.at(path) from error
    except OF_OWN_CODE as error:
        is_of_the_gpu = type(error).__name__ in ("OutOfMemoryError", "AcceleratorError") or "CUDA error" in str(error)
        if isinstance(error, FlatoutError | MemoryError) or is_of_the_gpu or is_of_a_collective(error):
            raise
        what = f"the {what}'s own code failed with {type(error).__name__}: {error}{end}"
        raise UsageError(f"{path}{line_of(error, path)}: {what}") from error


def line_of(error: BaseException, path: Path) -> str:
    """Return `:LINE` of a Python file at which an error arose; empty if it is not known."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    line = next((frame.lineno for frame in frames if frame.filename == str(path)), None)
    line = error.lineno if isinstance(error, SyntaxError) else line
    return f":{line}" if line else ""


@dataclass(frozen=True, slots=True)
class OwnCode:
    """A file of a person's code, as it was read once: what is run is what was hashed."""

    setting: str
    """The setting that names it, for messages."""
    what: str
    """What it holds, for messages: "loss", "converter"."""
    path: Path
    name: str
    """What the setting names in the file."""
    content: bytes
    digest: str
    """xxh3-128 of the content."""

    @classmethod
    def read(cls, named: str, setting: str, what: str) -> Self:
        """Read FILE.py:NAME, without running it. Raises UsageError."""
        file, _, name = named.rpartition(":")
        try:
            with Path(file).open("rb") as opened:
                content = opened.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            text = f"{setting}: {file} cannot be read: {reason}; name a file from the folder you start in"
            raise UsageError(text) from error
        if len(content) > MAX_FILE_BYTES:
            text = f"{setting}: {file} has more than {MAX_FILE_BYTES:,} bytes; name the file of the {what} alone"
            raise UsageError(text)
        return cls(setting, what, Path(file), name, content, xxh3_128_hexdigest(content))

    def load(self) -> Any:
        """Run the file, once in a process, and return what NAME is in it; None if it has no such name.

        Raises SecurityError in a process of `flatout studio`, where no page may start code.
        """
        if studio_folders():
            raise SecurityError(f"{self.setting}: {self.path} would run as code, which a page may not start")
        return getattr(_module(self.path.absolute(), self.content, self.digest, self.what), self.name, None)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise this code's errors in the block as `own_code_errors` does."""
        with own_code_errors(self.path.absolute(), self.what):
            yield


def refuse_start_by_import() -> None:
    """Raise UsageError if this process is importing a person's file for a setting: a run would wait for itself."""
    if _loading:
        starts = f"it starts a run when it is imported, which each process does that needs its {_loading[-1]}"
        raise UsageError(f"{starts}; {APART.format(f'the {_loading[-1]}')}")


@dataclass(frozen=True)
class _Source(SourceLoader):
    """Runs exactly the bytes that were hashed, and leaves no bytecode beside a person's file."""

    path: Path
    content: bytes

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_data(self, path: str | bytes) -> bytes:
        return self.content


@lru_cache(maxsize=8)
def _module(path: Path, content: bytes, digest: str, what: str) -> ModuleType:
    name = f"flatout_own_{digest}"
    spec = spec_from_loader(name, _Source(path, content))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # pydantic looks up the types of fields there
    sys.modules[name] = module
    # it may import from its own folder, as a script does
    sys.path.append(folder := f"{path.parent}/")
    _loading.append(what)
    try:
        with own_code_errors(path, what):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(folder)
        _loading.pop()
    return module
