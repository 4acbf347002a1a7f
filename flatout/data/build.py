"""From sources to a token store: built once by fingerprint, under a lock, and entered in the registry."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from flatout.config.schema import DataConfig, SourceConfig
from flatout.data import registry
from flatout.data.draw import copies_of_rows
from flatout.data.formats import RowParser, make_parser
from flatout.data.ledger import Ledger
from flatout.data.rows import BadRow, RawRow
from flatout.data.sources import RowSource, open_source
from flatout.data.store import VERSION, StoreMeta, StoreWriter, TokenStore, new_store
from flatout.data.template import template_text
from flatout.data.tokenize import SampleTokenizer, TokenizeOptions
from flatout.data.tokenizer import load_tokenizer, tokenizer_digest
from flatout.data.workers import ROWS_PER_CHUNK, Chunk, TokenizedChunk, tokenize_chunks
from flatout.errors import DataError

Progress = Callable[[int, int | None], None]
"""Called with rows done and rows in all (None: not known)."""
Say = Callable[[str], None]
"""Called with one sentence for the console."""


def _quiet(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Prepared:
    """All inputs of one build, resolved."""

    config: DataConfig
    sources: tuple[RowSource, ...]
    tokenizer: PreTrainedTokenizerBase
    options: TokenizeOptions
    meta: StoreMeta


def build(config: DataConfig, tokenizer_name: str, *, progress: Progress = _quiet, say: Say = _quiet) -> TokenStore:
    """Build the data set of `config.sources` anew and put it in the registry; `config.tokenizer` goes first.

    Raises DataError for bad data, ResourceError when a worker process dies. An older data set of that name stays
    until the new one is complete.
    """
    prepared = _prepare(config, tokenizer_name)
    folder = registry.built_dir(config.root, config.name)
    with _locked(folder, say):
        return _build(prepared, folder, progress, say)


def open_or_build(
    config: DataConfig, tokenizer_name: str, *, progress: Progress = _quiet, say: Say = _quiet
) -> TokenStore:
    """The data set of `config`: opened when one with the same fingerprint is there, else built.

    Several processes may call this at once: one builds, the others wait and open. Without sources, the data set of
    that name must be in the registry and fit the settings. Raises DataError, ResourceError.
    """
    if not config.sources:
        return _open_built(config, tokenizer_name)
    prepared = _prepare(config, tokenizer_name)
    folder = registry.built_dir(config.root, config.name)
    with _locked(folder, say):
        found = _finished(folder, prepared.meta.fingerprint)
        if found is not None:
            say(f"Reusing {folder}: same content, tokenizer, template and settings")
            _enter(config, found, folder)
            return found
        return _build(prepared, folder, progress, say)


def _prepare(config: DataConfig, tokenizer_name: str) -> _Prepared:
    if not config.sources:
        raise DataError(f"data set {config.name!r}: data.sources is empty; name a file, folder or hub id")
    name = config.tokenizer or tokenizer_name
    tokenizer = load_tokenizer(name)
    template_name, template = "", None
    if config.template is not None or tokenizer.chat_template is not None:
        template_name, template = template_text(tokenizer, config.template, name)
    options = TokenizeOptions(name, template_name, template, config.loss_type, config.max_tokens, config.too_long)
    sources = tuple(open_source(source) for source in config.sources)
    meta = StoreMeta(
        name=config.name,
        fingerprint="",
        tokenizer=name,
        tokenizer_digest=tokenizer_digest(tokenizer),
        template=template_name,
        template_digest=xxhash.xxh3_128_hexdigest((template or "").encode()),
        loss_type=config.loss_type,
        max_tokens=config.max_tokens,
        vocabulary_size=len(tokenizer),
        sources=tuple(source.path for source in config.sources),
    )
    return _Prepared(
        config, sources, tokenizer, options, replace(meta, fingerprint=_fingerprint(config, sources, meta))
    )


def _fingerprint(config: DataConfig, sources: tuple[RowSource, ...], meta: StoreMeta) -> str:
    """xxh3 over everything that decides the store's content; not over names and paths."""
    read = {"path", "hub", "split", "subset", "revision"}
    value = {
        "version": VERSION,
        "content": [[stamp.digest for stamp in source.files] for source in sources],
        "formats": [source.model_dump(exclude=read) for source in config.sources],
        "tokenizer": meta.tokenizer_digest,
        "template": meta.template_digest,
        "settings": config.model_dump(
            include={"loss_type", "max_tokens", "too_long", "on_bad_row", "num_samples", "shuffle", "seed"}
        ),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def _finished(folder: Path, fingerprint: str) -> TokenStore | None:
    if not folder.exists():
        return None
    try:
        store = TokenStore.open(folder)
    except DataError:
        return None  # damaged or of another version: it is built again, from the sources
    return store if store.meta.fingerprint == fingerprint else None


def _open_built(config: DataConfig, tokenizer_name: str) -> TokenStore:
    entry = registry.find(config.root, config.name)
    store = TokenStore.open(registry.entry_dir(config.root, entry))
    name = config.tokenizer or tokenizer_name
    tokenizer = load_tokenizer(name)
    problems = []
    if tokenizer_digest(tokenizer) != store.meta.tokenizer_digest:
        problems.append(f"tokenizer {store.meta.tokenizer!r}, now {name!r} is asked for")
    if config.template is not None and store.meta.template:
        _, source = template_text(tokenizer, config.template, name)
        if xxhash.xxh3_128_hexdigest(source.encode()) != store.meta.template_digest:
            problems.append(f"chat template {store.meta.template!r}, now {config.template!r} is asked for")
    for field in ("loss_type", "max_tokens"):
        if field in config.model_fields_set and getattr(config, field) != getattr(store.meta, field):
            problems.append(f"{field}={getattr(store.meta, field)}, now {getattr(config, field)} is asked for")
    if problems:
        raise DataError(
            f"data set {config.name!r} was built with {'; '.join(problems)}; build it again, or fit the settings"
        )
    return store


@contextmanager
def _locked(folder: Path, say: Say) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Waiting: another process builds {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(prepared: _Prepared, folder: Path, progress: Progress, say: Say) -> TokenStore:
    ledger = Ledger(prepared.config)
    tokenizer = SampleTokenizer(prepared.options, prepared.tokenizer)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        say(text)

    with new_store(folder) as writer:
        readers = [_Reader.open(s, c) for s, c in zip(prepared.sources, prepared.config.sources, strict=True)]
        for reader in readers:
            note(f"{reader.source.name}: {reader.parser.summary}")
        copies = _copies(prepared.config, readers)
        total = None if copies is None else sum(int((uses > 0).sum()) for uses in copies)
        chunks = _chunks(readers, copies, ledger.bad_row, note)
        files: dict[str, int] = {}
        for chunk, done in tokenize_chunks(chunks, tokenizer, prepared.config.num_procs):
            ledger.add(chunk, done)
            ledger.add_hashes(_write(writer, chunk, done, files))
            progress(ledger.counts["rows"], total)
        ledger.close(writer.num_samples)
        end_of_turn = ""
        if ledger.counts["conversations"]:
            end_of_turn = tokenizer.masker.end_of_turn()
            for text in tokenizer.notes():
                note(text)
        for text in ledger.notes():
            note(text)
        meta = replace(
            prepared.meta,
            template=tokenizer.masker.template.name if ledger.counts["conversations"] else "",
            files=tuple(files),
            counts=dict(ledger.counts),
            max_token_id=writer.max_token_id,
            end_of_turn=end_of_turn,
        )
        writer.finish(meta, ledger.report(notes))
    store = TokenStore.open(folder, verify=False)
    _enter(prepared.config, store, folder)
    return store


@dataclass(frozen=True, slots=True)
class _Reader:
    """A source with the parser that fits its first row."""

    source: RowSource
    parser: RowParser

    @classmethod
    def open(cls, source: RowSource, config: SourceConfig) -> _Reader:
        first = next(source.rows(_quiet), None)
        if first is None:
            raise DataError(f"{source.name}: no rows")
        return cls(source, make_parser(config, first))

    def rows(self, bad_row: BadRow, note: Say) -> Iterator[RawRow]:
        return self.parser.gather(self.source.rows(bad_row), bad_row, note)

    def count(self) -> int:
        """Rows that can be drawn; bad ones are told later, when they are read for good."""
        if self.source.num_rows is not None and self.parser.format != "oasst":
            return self.source.num_rows
        return sum(1 for _ in self.rows(_quiet, _quiet))


def _copies(config: DataConfig, readers: list[_Reader]) -> list[NDArray[np.int32]] | None:
    """How often each row is used; None: every row once, so nothing has to be counted first."""
    weights = [source.weight for source in config.sources]
    if config.num_samples is None and all(weight == 1.0 for weight in weights):
        return None
    counts = [reader.count() for reader in readers]
    return copies_of_rows(counts, weights, config.num_samples, shuffle=config.shuffle, seed=config.seed)


def _chunks(
    readers: list[_Reader], copies: list[NDArray[np.int32]] | None, bad_row: BadRow, note: Say
) -> Iterator[Chunk]:
    for index, reader in enumerate(readers):
        rows = enumerate(reader.rows(bad_row, note))
        if copies is None:
            used: Iterator[tuple[RawRow, int]] = ((row, 1) for _, row in rows)
        else:
            uses = copies[index]
            used = ((row, int(uses[i])) for i, row in rows if i < len(uses) and uses[i])
        while batch := list(islice(used, ROWS_PER_CHUNK)):
            counts = np.array([count for _, count in batch], dtype=np.int32)
            yield Chunk(reader.parser, tuple(row for row, _ in batch), counts)


def _write(writer: StoreWriter, chunk: Chunk, done: TokenizedChunk, files: dict[str, int]) -> NDArray[np.uint64]:
    """Append a chunk, rows drawn more than once again and again; returns the hashes of the first copies."""
    if not len(done.lengths):
        return np.zeros(0, np.uint64)
    origins = [chunk.rows[row].origin for row in done.piece_row]
    file_ids = np.array([files.setdefault(origin.source, len(files)) for origin in origins], np.int32)
    rows = np.array([origin.row for origin in origins], np.int64)
    hashes = writer.append(done.token_ids, done.trained, done.lengths, file_ids, rows)
    copies = chunk.copies[done.piece_row]
    starts = np.cumsum(done.lengths) - done.lengths
    for copy in range(1, int(copies.max())):
        again = np.flatnonzero(copies > copy)
        where = np.concatenate([np.arange(starts[p], starts[p] + done.lengths[p]) for p in again])
        writer.append(done.token_ids[where], done.trained[where], done.lengths[again], file_ids[again], rows[again])
    return hashes


def _enter(config: DataConfig, store: TokenStore, folder: Path) -> None:
    meta = store.meta
    entry = registry.Entry(
        name=config.name,
        path=str(folder.relative_to(config.root)),
        sources=meta.sources,
        num_samples=store.num_samples,
        tokenizer=meta.tokenizer,
        template=meta.template or None,
        loss_type=meta.loss_type,
        fingerprint=meta.fingerprint,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    registry.upsert(config.root, entry)
