"""Files of rows at an address (https://, s3://, gs://, hf://): found by name, and read while they are needed."""

from __future__ import annotations

import io
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import xxhash
from fsspec.spec import AbstractBufferedFile
from fsspec.utils import glob_translate

from flatout.config.schema import SourceConfig
from flatout.errors import DataError, ResourceError, UsageError
from flatout.io.address import SCHEMES, NoRangesError, Stat, Store, failure, open_store
from flatout.io.durable_io import DurableIO
from flatout.io.redact import printable, redacted

Log = Callable[[str], None]
_ATTEMPTS = 3
_BUFFER_BYTES = 8 << 20
_MAX_FILES = 100_000
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at an address; its text is the address without secrets.

    `copies` has the temporary file of one that its server says nothing of, once it is hashed.
    """

    address: str
    stat: Stat
    store: Store
    log: Log
    copies: list[IO[bytes]] = field(default_factory=list, compare=False)

    @property
    def name(self) -> str:
        """The last part of its path."""
        is_web = self.address.startswith("http")
        return PurePosixPath(unquote(urlsplit(self.address).path) if is_web else self.address).name

    def __str__(self) -> str:
        return str(printable(redacted(self.address)))

    def open(self, _: Literal["rb"]) -> io.BufferedReader:
        """Open it for reading; broken connections are taken up again where they broke."""
        return Path(self.copies[0].name).open("rb") if self.copies else io.BufferedReader(_Reader(self), 1 << 20)

    def digest(self) -> str:
        """Return xxh3-128 of what tells its content apart; of the content, if the server says nothing.

        The next answer may have another content, so what was hashed is kept for the rows.
        """
        if self.stat.mark:
            return xxhash.xxh3_128_hexdigest(f"{self.stat.size} {self.stat.kind} {self.stat.mark}".encode())
        self.log(f"{self}: the server gives neither ETag nor date, so the file is downloaded whole for its hash")
        copy, content = tempfile.NamedTemporaryFile(prefix="flatout-"), xxhash.xxh3_128()  # noqa: SIM115  (see `copies`)
        with DurableIO().resource_errors("write", Path(copy.name)), self.open("rb") as file:
            while block := file.read(_BUFFER_BYTES):
                content.update(block)
                copy.write(block)
            copy.flush()
        self.copies.append(copy)
        return content.hexdigest()

    def check_unchanged(self) -> None:
        """Raise DataError if the server has another file by now than when it was found."""
        if self.copies:
            return
        now = _asked(str(self), self.address, "look at", self.log, lambda: self.store.stat(self.stat.path))
        if (now.size, now.mark) != (self.stat.size, self.stat.mark):
            raise DataError(f"{self}: the file changed while it was read ({self.stat.kind}); run the command again")


def _asked(name: str, address: str, what: str, log: Log, ask: Callable[[], _Found]) -> _Found:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return ask()
        except (NoRangesError, UsageError):
            raise
        except Exception as error:  # each client has errors of its own; `failure` names them
            reason = failure(error, address.partition(":")[0])
            if isinstance(reason, DataError) or attempt == _ATTEMPTS:
                raise type(reason)(f"{name}: {reason}") from error
            log(f"{name}: {str(reason).partition(';')[0]}; asking again to {what} it")
            time.sleep(attempt - 1)
    raise AssertionError("unreachable")


class _Reader(AbstractBufferedFile):  # type: ignore[misc]  # fsspec is untyped
    """Reads a file in blocks, in one request as long as they follow each other."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0
        self._ask = partial(_asked, str(file), file.address, "send", file.log)
        self._stream: IO[bytes] | None = None
        size = file.stat.size
        if size is None:  # the server does not say: count while it is copied
            self._stream = self._ask(self._take_whole)
            size = self._stream.seek(0, io.SEEK_END)
            self._stream.seek(0)
        super().__init__(None, file.stat.path, block_size=_BUFFER_BYTES, size=size)

    def close(self) -> None:
        self._drop()
        super().close()

    def _fetch_range(self, start: int, end: int) -> bytes:
        data = b""
        while len(data) < end - start:
            data += self._ask(partial(self._part, start + len(data), end - start - len(data)))
        return data

    def _part(self, start: int, num_bytes: int) -> bytes:
        """Return some bytes from `start` on; what a connection fails to send is asked for in a new one."""
        is_next = self._stream is not None and start == self._at
        try:
            # fsspec's streams say that they can seek, and cannot
            if not (is_next or self._stream is None or isinstance(self._stream, AbstractBufferedFile)):
                self._stream.seek(start)
            elif not is_next:
                self._drop()
                try:
                    self._stream = self._file.store.open_at(self._file.stat.path, start)
                except NoRangesError:
                    self._stream = self._take_whole()
                    self._stream.seek(start)
            assert self._stream is not None
            data = self._stream.read(num_bytes)
        except BaseException:
            self._drop()
            raise
        self._at = start + len(data)
        if not data:
            self._drop()
            raise ResourceError(f"the download ended after {start:,} of {self.size:,} bytes; run the command again")
        return data

    def _drop(self) -> None:
        """Close a connection that is of no more use, whatever it says to that."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(Exception):
                stream.close()

    def _take_whole(self) -> IO[bytes]:
        """Copy the file to a nameless temporary file, as its server cannot begin in the middle."""
        whole = tempfile.TemporaryFile()  # noqa: SIM115  (closed with this reader)
        with closing(self._file.store.open_at(self._file.stat.path, 0)) as content:
            shutil.copyfileobj(content, whole, _BUFFER_BYTES)
        size = self._file.stat.size
        if size is not None and whole.tell() != size:
            raise ResourceError(f"the download ended after {whole.tell():,} of {size:,} bytes; run the command again")
        return whole


def find_remote(source: SourceConfig, log: Log) -> dict[RemoteFile, PurePosixPath]:
    """Return the files of an address, sorted, each with its path below it: one file, or all of a folder or pattern.

    Files whose types hold no rows are among them. Raises UsageError for an address that cannot be one, DataError if
    nothing is there, ResourceError if the store does not answer.
    """
    shown = printable(redacted(source.path))
    scheme, path = _parts(source, shown)
    store, stats, top = _asked(shown, source.path, "look at", log, lambda: _look(scheme, path))
    if len(stats) > _MAX_FILES:
        raise DataError(f"{shown}: over {_MAX_FILES:,} files; give a smaller folder, or a pattern")
    before = "" if scheme.startswith("http") else f"{scheme}://"
    files = [RemoteFile(before + stat.path, stat, store, log) for stat in sorted(stats, key=lambda stat: stat.path)]
    size = sum(file.stat.size or 0 for file in files)
    kinds = ", ".join(sorted({file.stat.kind or "a hash of its content" for file in files}))
    log(f"{shown}: {len(files)} file{'s' if files[1:] else ''}, {size / 1e6:,.1f} MB, known by {kinds}")
    return {file: PurePosixPath(file.stat.path.removeprefix(top) if top else file.name) for file in files}


def hub_stats(addresses: Sequence[str], log: Log) -> list[Stat]:
    """Return what the hub says of files at `hf://` addresses. Raises DataError and ResourceError."""
    store = open_store("hf", "")[0]
    paths = [address.removeprefix("hf://") for address in addresses]
    return [_asked(f"hf://{path}", "hf://", "look at", log, partial(store.stat, path)) for path in paths]


def hub_files(stats: Sequence[Stat], log: Log) -> list[RemoteFile]:
    """Return files of the hub by what it said of them before; it is not asked again."""
    store = open_store("hf", "")[0]
    return [RemoteFile(f"hf://{stat.path}", stat, store, log) for stat in stats]


def _parts(source: SourceConfig, shown: str) -> tuple[str, str]:
    """Return the scheme of an address and the rest. Raises UsageError and DataError for what cannot be one."""
    scheme, _, path = source.path.partition("://")
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise UsageError(f"{shown}: addresses begin with {known}; found {scheme}://")
    try:
        parts = urlsplit(source.path)
        is_place = bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:
        is_place = False
    if not is_place or re.search(r"\s", parts.netloc) or (scheme == "hf" and "/" not in path):
        written = {"http": "HOST/FILE", "https": "HOST/FILE", "hf": "datasets/ORG/SET"}.get(scheme, "BUCKET/FILE")
        raise UsageError(f"{shown}: no valid address; expected {scheme}://{written}")
    if scheme.startswith("http") and "@" in parts.netloc:
        raise UsageError(f"{shown}: no passwords in addresses; put the server's login into ~/.netrc")
    for setting, value in {"subset": source.subset, "hub": source.hub, "revision": source.revision}.items():
        if value:
            how = "; write hf://datasets/org/set@REVISION/..." if scheme == "hf" and setting == "revision" else ""
            raise DataError(f"{shown}: {setting}: {value!r} is for hub ids, but this is an address; remove it{how}")
    return scheme, path


def _look(scheme: str, path: str) -> tuple[Store, list[Stat], str]:
    """Return the store, the files that are there, and what their paths begin with ("" for a file itself)."""
    store, place = open_store(scheme, path)
    is_web = scheme.startswith("http")
    magic = None if is_web else re.search(r"[^/]*[*?\[]", place)
    if magic is None and (is_web or not place.endswith("/")):
        try:
            return store, [store.stat(place)], ""
        except FileNotFoundError:
            if is_web:
                raise
    top = place[: magic.start()] if magic else place
    stats = store.find(top.rstrip("/"))
    if magic:
        wanted = re.compile(glob_translate(place))
        stats = [stat for stat in stats if wanted.match(stat.path)]
    if not stats:
        raise FileNotFoundError(place)
    return store, stats, top.rstrip("/") + "/"
