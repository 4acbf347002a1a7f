"""From sources to a token store: built once per fingerprint, under a lock, and entered in the registry."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice, repeat
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from flatout.config.schema import DataConfig, SourceConfig
from flatout.data import registry
from flatout.data.build_report import BuildReport
from flatout.data.rows.formats.parser import RowParser, make_parser
from flatout.data.rows.read import BadRow, RawRow
from flatout.data.rows.sources import RowSource, open_source
from flatout.data.sampling import copies_of_rows
from flatout.data.templates.template import template_text
from flatout.data.token_store import VERSION, StoreMeta, StoreWriter, TokenStore, new_store
from flatout.data.tokenize import SampleTokenizer, TokenizeOptions
from flatout.data.tokenizer import load_tokenizer, tokenizer_digest
from flatout.data.workers import ROWS_PER_CHUNK, Chunk, TokenizedChunk, tokenize_chunks, usable_procs
from flatout.errors import DataError, UsageError
from flatout.io.file_lock import locked
from flatout.io.redact import printable, redacted

Progress = Callable[[int, int | None], None]
"""Called with the number of rows done and of all rows (None if not known)."""
Say = Callable[[str], None]
"""Called with one sentence for the console."""


SETTINGS = (
    "template_args", "empty_reasoning", "special_tokens", "loss_type", "max_tokens", "too_long", "on_bad_row",
    "num_samples", "shuffle", "seed",
)  # fmt: skip
"""Settings of `data` that decide which tokens are stored."""


TOLD_EVERY_S = 30.0
"""How often a long build reports its progress."""
_ROWS_TO_DETECT = 100


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


def open_or_build(
    config: DataConfig, tokenizer_name: str, *, replaces: bool = True, progress: Progress = _quiet, say: Say = _quiet
) -> TokenStore:
    """Open the data set of `config` if one with the same fingerprint exists; otherwise build it, replacing any other.

    Several processes may call this at once: one builds, the others wait and open. Without sources, the data set of that
    name must be in the registry and fit the settings. Raises DataError, ResourceError, and UsageError if there is
    another data set of that name and `replaces` is False.
    """
    if not config.sources:
        return _open_built(config, tokenizer_name)
    prepared = _prepare(config, tokenizer_name)
    folder = registry.built_dir(config.root, config.name)
    lock = folder.with_name(f".{folder.name}.lock")
    with locked(lock, f"the process that builds {folder}", say):
        if folder.exists():
            change = "it is damaged"
            try:
                found = TokenStore.open(folder)
                if found.meta.fingerprint == prepared.meta.fingerprint:
                    say(f"Reusing {folder}: same content, tokenizer, template and settings")
                    _enter(config, found, folder)
                    return found
                change = _change(found.meta, prepared.meta) or "its rows, or how they are read, have changed"
            except DataError as error:
                change = str(error)
            if not replaces:
                raise UsageError(
                    f"data set {config.name!r} is there already: {change}; give another --name, or --replace"
                )
            say(f"Building {config.name!r} again: {change}")
        return _build(prepared, folder, progress, say)


def _prepare(config: DataConfig, tokenizer_name: str) -> _Prepared:
    name = config.tokenizer or tokenizer_name
    tokenizer = load_tokenizer(name)
    template_name, template = "", None
    if config.template is not None or tokenizer.chat_template is not None:
        template_name, template = template_text(tokenizer, config.template, name)
    options = TokenizeOptions(
        name,
        template_name,
        template,
        tuple(config.template_args.items()),
        config.empty_reasoning == "mask",
        config.loss_type,
        config.max_tokens,
        config.too_long,
        config.special_tokens,
    )
    sources = tuple(open_source(source) for source in config.sources)
    meta = StoreMeta(
        name=config.name,
        fingerprint="",
        tokenizer=name,
        tokenizer_digest=tokenizer_digest(tokenizer),
        template=template_name,
        template_text=template or "",
        settings=config.model_dump(mode="json", include=set(SETTINGS)),
        vocabulary_size=len(tokenizer),
        sources=tuple(redacted(source.path) for source in config.sources),
    )
    return _Prepared(
        config, sources, tokenizer, options, replace(meta, fingerprint=_fingerprint(config, sources, meta))
    )


def _fingerprint(config: DataConfig, sources: tuple[RowSource, ...], meta: StoreMeta) -> str:
    """Return xxh3 over everything that decides the store's content; names and paths are left out."""
    read = {"path", "hub", "split", "subset", "revision"}
    value = {
        "version": VERSION,
        "content": [[stamp.digest for stamp in source.files] for source in sources],
        "formats": [source.model_dump(exclude=read) for source in config.sources],
        "tokenizer": meta.tokenizer_digest,
        "template": meta.template_text,
        "settings": meta.settings,
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def _open_built(config: DataConfig, tokenizer_name: str) -> TokenStore:
    entry = registry.find(config.root, config.name)
    store = TokenStore.open(registry.entry_dir(config.root, entry))
    name = config.tokenizer or tokenizer_name
    tokenizer = load_tokenizer(name)
    asked = {key: value for key, value in config if key in SETTINGS and key in config.model_fields_set}
    template, text = "", ""
    if config.template is not None:
        template, text = template_text(tokenizer, config.template, name)
    wanted = replace(
        store.meta,
        tokenizer=name,
        tokenizer_digest=tokenizer_digest(tokenizer),
        template=template,
        template_text=text or store.meta.template_text,
        settings=asked,
    )
    if change := _change(store.meta, wanted):
        raise DataError(f"data set {config.name!r} was built with {change}; build it again, or fit the settings")
    return store


def _change(built: StoreMeta, wanted: StoreMeta) -> str:
    """Describe how the settings of two data sets differ ("max_tokens=2048, now 4096 is asked for"); empty if equal."""
    changes = []
    if built.tokenizer_digest != wanted.tokenizer_digest:
        changes.append(f"tokenizer {built.tokenizer!r}, now {wanted.tokenizer!r} is asked for")
    if built.template_text and built.template_text != wanted.template_text:
        changes.append(f"chat template {built.template!r}, now {wanted.template!r} is asked for")
    for name, asked in wanted.settings.items():
        if (had := built.settings.get(name, "not recorded")) != asked:
            changes.append(f"{name}={had}, now {asked} is asked for")
    return "; ".join(changes)


def _build(prepared: _Prepared, folder: Path, progress: Progress, say: Say) -> TokenStore:
    config, report = prepared.config, BuildReport(prepared.config)
    tokenizer = SampleTokenizer(prepared.options, prepared.tokenizer)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(printable(redacted(text)))
        say(notes[-1])

    num_procs = usable_procs(config.num_procs)
    if config.num_procs not in (None, num_procs):
        note(f"num_procs: {config.num_procs} lowered to {num_procs}; more processes than cores only take memory")

    with new_store(folder) as writer:
        readers = [_Reader.open(s, c) for s, c in zip(prepared.sources, config.sources, strict=True)]
        for reader in readers:
            note(f"{reader.source.name}: {reader.parser.summary}")

        weights = [source.weight for source in config.sources]
        copies: list[NDArray[np.int32]] | None = None  # None: every row is used once, so rows need not be counted first
        if config.num_samples is not None or any(weight != 1.0 for weight in weights):
            counts = [reader.count() for reader in readers]
            copies = copies_of_rows(counts, weights, config.num_samples, shuffle=config.shuffle, seed=config.seed)
            total: int | None = sum(int((uses > 0).sum()) for uses in copies)
        else:
            about = [None if reader.parser.threads else reader.source.about_rows() for reader in readers]
            total = None if None in about else sum(count or 0 for count in about)

        start_s = told_s = time.monotonic()
        chunks = _chunks(readers, copies, report.bad_row, note)
        files: dict[str, int] = {}
        for chunk, done in tokenize_chunks(chunks, tokenizer, config.num_procs):
            report.add(chunk, done)
            report.add_hashes(_write(writer, chunk, done, files))
            num_rows, now_s = report.counts["rows"], time.monotonic()
            progress(num_rows, total)
            if now_s - told_s >= TOLD_EVERY_S:
                told_s, per_s = now_s, num_rows / (now_s - start_s)
                left = f" of about {total:,}, {max(total - num_rows, 0) / per_s:,.0f} s left" if total else ""
                say(f"tokenized {num_rows:,} rows{left}, {per_s:,.0f} rows/s")
        report.close(writer.num_samples)
        meta = replace(
            prepared.meta,
            files=tuple(map(redacted, files)),
            counts=dict(report.counts),
            max_token_id=writer.max_token_id,
        )
        if report.counts["conversations"]:
            meta = replace(meta, end_of_turn=tokenizer.masker.end_of_turn())
        else:
            meta = replace(meta, template="", template_text="")
        for text in [*(tokenizer.notes() if report.counts["conversations"] else []), *report.notes()]:
            note(text)
        writer.finish(meta, redacted(report.report(notes)))
    store = TokenStore.open(folder, verify=False)
    _enter(config, store, folder)
    return store


@dataclass(frozen=True, slots=True)
class _Reader:
    """A source and its parser, chosen from the first row that shows the format."""

    source: RowSource
    parser: RowParser

    @classmethod
    def open(cls, source: RowSource, config: SourceConfig) -> _Reader:
        problem: DataError | None = None
        for row in islice(source.rows(_quiet), _ROWS_TO_DETECT):
            try:
                return cls(source, make_parser(config, row))
            except DataError as error:  # a null in one row does not rule out the others
                problem = problem or error
        raise problem or DataError(f"{source.name}: no rows")

    def rows(self, bad_row: BadRow, note: Say) -> Iterator[RawRow]:
        return self.parser.gather(self.source.rows(bad_row), bad_row, note)

    def count(self) -> int:
        """Return the number of rows that can be drawn; bad ones are reported later, when the rows are parsed."""
        if self.source.num_rows is not None and not self.parser.threads:
            return self.source.num_rows
        return sum(1 for _ in self.rows(_quiet, _quiet))


def _chunks(
    readers: list[_Reader], copies: list[NDArray[np.int32]] | None, bad_row: BadRow, note: Say
) -> Iterator[Chunk]:
    for index, reader in enumerate(readers):
        rows = reader.rows(bad_row, note)
        uses: Iterable[int] = repeat(1) if copies is None else copies[index]
        used = ((row, int(count)) for row, count in zip(rows, uses, strict=False) if count)
        while batch := list(islice(used, ROWS_PER_CHUNK)):
            counts = np.array([count for _, count in batch], dtype=np.int32)
            yield Chunk(reader.parser, tuple(row for row, _ in batch), counts)


def _write(writer: StoreWriter, chunk: Chunk, done: TokenizedChunk, files: dict[str, int]) -> NDArray[np.uint64]:
    """Append a chunk, repeating rows that are drawn more than once; return the hashes of the first copies."""
    if not len(done.lengths):
        return np.zeros(0, np.uint64)
    origins = [chunk.rows[row].origin for row in done.piece_row]
    file_ids = np.array([files.setdefault(origin.source, len(files)) for origin in origins], np.int32)
    rows = np.array([origin.row_number for origin in origins], np.int64)
    hashes = writer.append(done.token_ids, done.loss_mask, done.lengths, file_ids, rows)
    copies = chunk.copies[done.piece_row]
    starts = np.cumsum(done.lengths) - done.lengths
    for copy in range(1, int(copies.max())):
        again = np.flatnonzero(copies > copy)
        where = np.concatenate([np.arange(starts[p], starts[p] + done.lengths[p]) for p in again])
        writer.append(done.token_ids[where], done.loss_mask[where], done.lengths[again], file_ids[again], rows[again])
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
        loss_type=config.loss_type,
        fingerprint=meta.fingerprint,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    registry.upsert(config.root, entry)
