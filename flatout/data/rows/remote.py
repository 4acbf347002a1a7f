"""Files of rows at an address (https://, s3://, gs://, hf://) and sets of the hub by id, read while they are needed."""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import xxhash
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from fsspec.utils import glob_translate

from flatout.config.schema import SourceConfig
from flatout.data.rows.read import row_type, total_rows
from flatout.errors import DataError, Fix, ResourceError, UsageError, first_line
from flatout.io.address import SCHEMES, Stat, asked, open_filesystem, stat_of
from flatout.io.durable_io import DurableIO, digest
from flatout.io.kept_facts import find_facts, keep_facts
from flatout.io.redact import printable, redacted

Log = Callable[[str], None]
_BLOCK_BYTES = 8 << 20
_MAX_FILES = 100_000
_Found = TypeVar("_Found")
_PINNED = re.compile(r"hf://datasets/[^@]+@([0-9a-f]{40})/?")
_SPLIT_NAME = re.compile(r"\w+([-.]\w+)*")
_CLASS = re.compile(r" *[(][A-Za-z]+Error[)]")
# loaders of `datasets` that read what our readers do; its loader of texts makes a row of each line
_READ_AS_FILES = ("ArrowConfig", "CsvConfig", "JsonConfig", "ParquetConfig")
_NO_OPTIONS = {"name", "version", "data_dir", "data_files", "description", "features"}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at an address; its text is the address without secrets."""

    address: str
    """Its scheme, and the path by which its store knows it."""
    stat: Stat
    """What the store said of it when it was found."""
    files: AbstractFileSystem
    """The store."""
    log: Log
    """Is told of connections that failed."""
    copies: list[IO[bytes]] = field(default_factory=list, compare=False)
    """The temporary file of one that its server says nothing of, or not its size, once it was opened or hashed."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        is_web = self.address.startswith("http")
        return PurePosixPath(unquote(urlsplit(self.address).path) if is_web else self.address).name

    def __str__(self) -> str:
        return str(printable(redacted(self.address)))

    def open(self, _: Literal["rb"]) -> io.BufferedReader:
        """Open it for reading; what a broken connection failed to send is asked for again."""
        if not self.stat.mark or self.stat.size is None:
            return self._copy().open("rb")
        return io.BufferedReader(_Reader(self), 1 << 20)

    def download(self) -> IO[bytes]:
        """Copy it to a temporary file, which is there as long as the result."""
        copy = tempfile.NamedTemporaryFile(prefix="flatout-")  # noqa: SIM115  (closed by its reader)
        with closing(self.files.open(self.stat.path, block_size=0, size=1)) as content:
            for block in iter(partial(content.read, _BLOCK_BYTES), b""):
                with DurableIO().resource_errors("write", Path(copy.name)):
                    copy.write(block)
        if self.stat.size not in (None, copy.tell()):
            raise ResourceError(f"the download ended after {copy.tell():,} of {self.stat.size:,} bytes; try again")
        copy.seek(0)
        return copy

    def digest(self) -> str:
        """Return xxh3-128 of what tells its content apart; of the content, if the server says nothing.

        The next answer may have another content, so what was hashed is kept for the rows.
        """
        if self.stat.mark:
            return xxhash.xxh3_128_hexdigest(f"{self.stat.size} {self.stat.kind} {self.stat.mark}".encode())
        return digest(self._copy()).xxh3

    def _copy(self) -> Path:
        if not self.copies:
            if not self.stat.mark:
                why = "the server gives neither ETag nor date, so the file is downloaded whole for its hash"
                self.log(f"{self}: {why}")
            self.copies.append(self.asked("send", self.download))
        return Path(self.copies[0].name)

    def check_unchanged(self) -> None:
        """Raise DataError if the server has another file by now than when it was found."""
        if not self.stat.mark:
            return
        now = self.asked("look at", partial(_stat, self.files, self.stat.path))
        if (now.size, now.mark) != (self.stat.size, self.stat.mark):
            raise DataError(f"{self}: the file changed while it was read ({self.stat.kind}); run the command again")

    def asked(self, what: str, ask: Callable[[], _Found]) -> _Found:
        """Return what the store answers; see `asked` of io/address.py."""
        return asked(str(self), self.address, what=what, log=self.log, ask=ask)


def _stat(files: AbstractFileSystem, path: str) -> Stat:
    return stat_of(files.info(path))


class _Reader(AbstractBufferedFile):  # type: ignore[misc]  # fsspec is untyped
    """Reads a file of known size block by block; a connection that breaks is replaced."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        super().__init__(file.files, file.stat.path, block_size=_BLOCK_BYTES, size=file.stat.size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        data = b""
        while len(data) < end - start:
            data += self._file.asked("send", partial(self._part, start + len(data), end))
        return data

    def _part(self, start: int, end: int) -> bytes:
        file, how = self._file, {"block_size": _BLOCK_BYTES, "cache_type": "none", "size": self.size}
        try:
            opened = Path(file.copies[0].name).open if file.copies else partial(file.files.open, file.stat.path, **how)
            with opened("rb") as content:
                content.seek(start)
                data: bytes = content.read(end - start)
        except ValueError:  # fsspec: the server sends a file only from its start
            file.copies.append(file.download())
            return self._part(start, end)
        if not data:
            raise ResourceError(f"the download ended after {start:,} of {self.size:,} bytes; run the command again")
        return data


def find_remote(source: SourceConfig, log: Log) -> dict[RemoteFile, PurePosixPath]:
    """Return the files of an address, sorted, each with its path below it: one file, or all of a folder or pattern.

    Files whose types hold no rows are among them. Raises UsageError for an address that cannot be one, DataError if
    nothing is there, ResourceError if the store does not answer.
    """
    shown = printable(redacted(source.path))
    scheme, path = _parts(source, shown)
    store, stats, top = asked(shown, source.path, what="look at", log=log, ask=lambda: _look(scheme, path))
    if len(stats) > _MAX_FILES:
        raise DataError(f"{shown}: over {_MAX_FILES:,} files; give a smaller folder, or a pattern")
    before = "" if scheme.startswith("http") else f"{scheme}://"
    files = [RemoteFile(before + stat.path, stat, store, log) for stat in sorted(stats, key=lambda stat: stat.path)]
    kinds = ", ".join(sorted({file.stat.kind or "a hash of its content" for file in files}))
    log(f"{shown}: {_size_of(files)}, known by {kinds}")
    return {file: PurePosixPath(file.stat.path.removeprefix(top) if top else file.name) for file in files}


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


def _look(scheme: str, path: str) -> tuple[AbstractFileSystem, list[Stat], str]:
    """Return the store, the files that are there, and what their paths begin with ("" for a file itself)."""
    files, place = open_filesystem(scheme, path)
    if scheme.startswith("http"):
        return files, [_stat(files, place)], ""
    magic = re.search(r"[^/]*[*?\[]", place)
    if magic is None and not place.endswith("/"):
        with suppress(FileNotFoundError):
            return files, [_stat(files, place)], ""
    top = (place[: magic.start()] if magic else place).rstrip("/")
    entries: dict[str, Any] = files.find(top, detail=True)
    wanted = re.compile(glob_translate(place)) if magic else None
    stats = [stat_of(facts) for name, facts in entries.items() if wanted is None or wanted.match(name)]
    if not stats:
        raise FileNotFoundError(place)
    return files, stats, top + "/"


@dataclass(frozen=True, slots=True)
class HubSet:
    """A split of a set on the hub at one commit."""

    name: str
    address: str
    """That of the set, with its commit."""
    files: Sequence[RemoteFile] = ()
    num_rows: int | None = None
    """None if only parsing would tell."""
    loaded: Any = None
    """What `datasets` loaded where only it can read the files."""


def find_hub_set(source: SourceConfig, log: Log) -> HubSet:
    """Ask the hub which commit the revision of a set is now, and which files hold the split there.

    What it says is kept: where it does not answer later, a set that was built is still known to be the same. Raises
    DataError, and ResourceError if the hub does not send what it has.
    """
    import datasets  # lazy: the import takes a second, and local data does not need it
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    split = source.split or "train"
    name = f"{source.path}[{source.subset + '/' if source.subset else ''}{split}]"
    key = {"hub": constants.ENDPOINT, "split": split, **source.model_dump(include={"path", "subset", "revision"})}
    kept = find_facts("hub-sets", key)
    try:
        builder = datasets.load_dataset_builder(source.path, source.subset, revision=source.revision)
        pinned = _PINNED.match(str(builder.base_path or ""))
        if not pinned and kept:
            raise ConnectionError("`datasets` knows the set from its cache only")
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        answered = isinstance(error, FileNotFoundError | ValueError | RuntimeError | datasets.exceptions.DatasetsError)
        if kept is None or (answered and not isinstance(error, LocalEntryNotFoundError)):
            raise _failure(source, name, error) from error
        reason = _CLASS.sub("", first_line(error))
        log(f"{name}: the hub does not respond ({reason}); what it said on {kept.when} holds")
        return _of_files(source, name, kept.facts, log)
    if pinned and kept and kept.facts["commit"] == pinned[1]:
        return _of_files(source, name, kept.facts, log)
    if pinned and kept:
        log(f"{name}: {source.revision or 'main'} was commit {kept.facts['commit']}, and is {pinned[1]} now")
    if pinned and (addresses := _addresses(builder, split, name, source.path)):
        store, paths = open_filesystem("hf", "")[0], [address.removeprefix("hf://") for address in addresses]
        stats = [asked(f"hf://{at}", "hf://", what="look at", log=log, ask=partial(_stat, store, at)) for at in paths]
        num_rows = total_rows(_hub_files(stats, log))
        facts = {"commit": pinned[1], "files": [asdict(stat) for stat in stats], "num_rows": num_rows}
        keep_facts("hub-sets", key, facts)
        return _of_files(source, name, facts, log)
    return _loaded(source, split, name, pinned[1] if pinned else None, log)


def _hub_files(stats: Iterable[Stat], log: Log) -> list[RemoteFile]:
    """Return files of the hub by what it said of them before; it is not asked again."""
    store = open_filesystem("hf", "")[0]
    return [RemoteFile(f"hf://{stat.path}", stat, store, log) for stat in stats]


def _of_files(source: SourceConfig, name: str, facts: Mapping[str, Any], log: Log) -> HubSet:
    files = _hub_files([Stat(**stat) for stat in facts["files"]], log)
    log(f"{name}: commit {facts['commit']}, {_size_of(files)}, read while they are needed")
    return HubSet(name, f"hf://datasets/{source.path}@{facts['commit']}", files, facts["num_rows"])


def _size_of(files: Sequence[RemoteFile]) -> str:
    size_bytes = sum(file.stat.size or 0 for file in files)
    return f"{len(files)} file{'s' if files[1:] else ''}, {size_bytes / 1e6:,.1f} MB"


def _addresses(builder: Any, split: str, name: str, path: str) -> list[str]:
    """Return the files of a split; none if only `datasets` can read them as the set's page says. Raises DataError."""
    config = builder.config
    files_of = {str(key): list(files) for key, files in (config.data_files or {}).items()}
    if split not in (*files_of, "all") and _SPLIT_NAME.fullmatch(split):
        fixes = [Fix({"data.sources": [{"path": path, "split": one}]}, "for example") for one in [*files_of][:1]]
        raise DataError(f"{name}: no split {split!r}; it has {', '.join(files_of)}", fixes)
    options, defaults = vars(config), vars(type(config)())
    has_options = any(options[key] != defaults.get(key) for key in options.keys() - _NO_OPTIONS)
    if type(config).__name__ not in _READ_AS_FILES or has_options or split not in files_of:
        return []
    return files_of[split] if all(row_type(PurePath(address)) for address in files_of[split]) else []


def _loaded(source: SourceConfig, split: str, name: str, commit: str | None, log: Log) -> HubSet:
    """Let `datasets` download a set that is not plain files, or open it from its cache if the hub does not respond."""
    import datasets

    try:
        # rows only: `datasets` 4 and later never runs code from the data set's repository
        loaded: Any = datasets.load_dataset(
            source.path, source.subset, split=split, revision=commit or source.revision, streaming=False
        )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _failure(source, name, error) from error
    if not loaded.cache_files:
        raise DataError(f"{name}: `datasets` keeps this data set only in memory; save it to a parquet file and use it")
    # its cache has a folder for each commit
    known = commit or next(iter(re.findall(r"/([0-9a-f]{40})/", loaded.cache_files[0]["filename"])), None)
    log(f"{name}: commit {known or 'not known'}, in the cache of `datasets`")
    address = f"{source.path}@{known}" if known else source.path
    return HubSet(name.replace(source.path, address, 1), address, (), int(loaded.num_rows), loaded)


def _failure(source: SourceConfig, name: str, error: Exception) -> DataError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return DataError(
        f"hub data set {name} (revision {source.revision or 'main'}) cannot be loaded: "
        f"{_CLASS.sub('', ' '.join(lines[:2])) or 'no reason given'}; "
        "There is no local file or folder of that name; check path, subset, split and revision, and log in for a "
        f"private set. If offline, run `hf download {source.path} --repo-type dataset --local-dir DIR` on a "
        "machine with a network and name DIR as the path."
    )
