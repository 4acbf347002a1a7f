"""From sources to a token store: built once per fingerprint, under a lock, and entered in the registry."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from flatout.config.folders import free_folder
from flatout.config.schema import DataConfig
from flatout.data import registry, token_store
from flatout.data.build_report import BuildReport, timed
from flatout.data.columns import PICTURES
from flatout.data.conversation import Conversation
from flatout.data.dedupe import without_repeated
from flatout.data.pictures.files import changed_pictures
from flatout.data.pictures.processor import processor_digest
from flatout.data.readers import (
    ROWS_TO_DETECT,
    Readers,
    choose_parser,
    choose_parsers,
    count_rows,
    most_rows,
    own_columns,
    refuse_prompts,
    with_classes,
)
from flatout.data.rows.converter import converted
from flatout.data.rows.formats.advice import with_sources
from flatout.data.rows.sources import RowSource, local_source, open_source
from flatout.data.store_writer import StoreWriter, append_chunk, new_store
from flatout.data.templates.template import template_text
from flatout.data.token_store import MANIFEST, StoreMeta, TokenStore, with_mask_rules
from flatout.data.tokenize import SampleTokenizer, TokenizeOptions
from flatout.data.tokenizer import TokenizerFacts, has_no_template, load_tokenizer, tokenizer_facts, tokenizer_of
from flatout.data.workers import ROWS_PER_CHUNK, Chunk, Problem, tokenize_chunks, usable_procs
from flatout.errors import DataError, Fix, UsageError
from flatout.io.file_lock import locked
from flatout.io.kept_facts import code_identity
from flatout.io.redact import printable, redacted

Progress = Callable[[int, int | None], None]
"""Called with the number of rows done and of all rows (None if not known)."""
Log = Callable[[str], None]
"""Called with one sentence for the console."""
Content = dict[str, Any]
"""What a store is made of, as JSON."""

_NOT_OF_TOKENS = {"name", "root", "sources", "tokenizer", "template", "num_procs"}
"""Settings of `data` that do not decide which tokens are stored; those of rows, tokenizer and template count by their
content."""
_DEFAULTS = DataConfig().model_dump(mode="json")
_FINGERPRINT_VERSION = 2
"""Raised when the same rows and settings give other tokens."""

_EARLIER = "by earlier rules of which tokens carry loss"
# a refused build keeps an unfinished shard from so many tokens on
_WORTH_KEEPING_TOKENS = 1 << 16


def open_or_build(
    config: DataConfig,
    tokenizer_name: str,
    *,
    replaces: bool = True,
    reads_again: bool = False,
    trained_on: Container[str] = (),
    progress: Progress = lambda *_: None,
    log: Log = lambda _: None,
) -> TokenStore:
    """Open the data set of `config` if one with the same fingerprint exists; otherwise build it, replacing any other.

    One that only has earlier rules of the loss mask, or whose picture files changed, stays if its fingerprint is in
    `trained_on`: of a run that goes on. With `reads_again`, one with pictures is built again in any case.

    Several processes may call this at once: one builds, the others wait and open. Without sources, the data set of that
    name must be in the registry and fit the settings. Raises DataError, ResourceError, and UsageError if there is
    another data set of that name and `replaces` is False.
    """
    name = config.tokenizer or tokenizer_name
    if not config.sources:
        return _open_built(config, name, log)
    facts = tokenizer_facts(name, added=config.added_tokens, log=log)
    if config.added_tokens:
        known = load_tokenizer(name).get_vocab()
        old = [text for text in config.added_tokens if text in known]
        line = f"{len(config.added_tokens) - len(old)} new tokens; the tokenizer has {facts.num_tokens:,}"
        log(line + (f"; not added, as they exist: {', '.join(map(repr, old))}" if old else ""))
    registry.load(config.root)  # one that flatout did not write ends here
    with with_sources(config.sources):
        sources = [converted(open_source(source, log), source, log) for source in config.sources]
    meta, content = describe(config, name, facts, sources)
    folder = registry.built_dir(config.root, config.name)
    lock = locked(folder.with_name(f".{folder.name}.lock"), f"the process that builds {folder}", log)
    with lock, with_sources(config.sources):
        store = None
        if folder.exists():
            if not (folder / MANIFEST).is_file() and (not folder.is_dir() or any(folder.iterdir())):
                raise UsageError(
                    f"{folder} is not a built data set, and {config.name!r} would replace it; choose another name, or "
                    "move it away"
                )
            store, change = _kept_store(meta, content, folder, trained_on, log)
            if store and reads_again and store.num_pictures:
                store, change = None, "its pictures are read again"
            if store is None and not reads_again:
                _require_built(folder)
            if store is None and not replaces:
                choose_parsers(sources, config.sources)  # columns that no format reads are told first
                fixes = [Fix({"--replace": True}, "replaces it"), Fix({"--name": f"{config.name}-2"}, "keeps both")]
                raise UsageError(f"data set {config.name!r} already exists and differs: {change}", fixes)
            reused = f"Reusing {folder}: same content, tokenizer, template and settings{change and f'; {change}'}"
            log(reused if store else f"Rebuilding {config.name!r}: {change}")
        if store is None:
            _build(config, sources, tokenizer_name, (meta, content), folder, progress, log)
            store = TokenStore.open(folder, verify=False)
        registry.upsert(config.root, registry.entry_of(config, store))
        return store


def refuse_early(config: DataConfig, tokenizer_name: str) -> None:
    """Raise DataError for what a build would refuse by the files of rows and tokenizer alone; needs no torch.

    It reads the first rows of local files, unless the data set exists, and looks at a tokenizer in a folder.
    """
    name = config.tokenizer or tokenizer_name
    has_template = config.template is not None or not has_no_template(name)
    is_built = registry.built_dir(config.root, config.name).exists()
    for source in () if is_built else config.sources:
        with with_sources(config.sources):
            if source.converter or (opened := local_source(source)) is None:
                continue  # a converter runs in the build, once
            rows = islice(opened.rows(lambda _: None), ROWS_TO_DETECT)
            parser, first = choose_parser(opened.name, source, rows)
            refuse_prompts(opened.name, parser)
        for row in () if has_template else chain([first], rows):
            sample = None
            with suppress(DataError):  # a bad row is for `on_bad_row`
                sample = parser.parse(row)
            if isinstance(sample, Conversation):
                template_text(TokenizerFacts("", 0, None), None, name)


def _kept_store(
    meta: StoreMeta, content: Content, folder: Path, trained_on: Container[str], log: Log
) -> tuple[TokenStore | None, str]:
    """Return the store in `folder` if it is as `meta` says, and what is known of its pictures; else None, and why not.

    A setting that it does not record is younger than the store, which has what the setting's default gives. One that no
    longer exists changes nothing if it was off.
    """
    try:
        store = TokenStore.open(folder)
    except DataError as error:
        return None, error.text
    asked = meta.settings.items()
    known = {name: value for name, value in asked if name in store.meta.settings or value != _DEFAULTS[name]}
    known |= {name: value for name, value in store.meta.settings.items() if name not in _DEFAULTS and not value}
    fingerprint = _fingerprint(content | {"settings": known})
    if store.meta.fingerprint != with_mask_rules(fingerprint, store.meta.mask_rules):
        return None, _change(store.meta, meta) or "its rows or the way they are read changed"
    if store.meta.processor not in ("", meta.processor):
        return None, f"{meta.tokenizer!r} has another image processor now"
    differs, pictures = changed_pictures(folder) if store.num_pictures else ("", "")
    differs = f"it was built {_EARLIER}" if store.meta.has_earlier_rules else differs
    if not differs:
        return store, pictures
    if store.meta.fingerprint not in trained_on:
        return None, differs
    log(f"{folder}: {differs}; the run continues with it")
    return store, ""


def _require_built(folder: Path) -> None:
    """Raise UsageError for a store that was not built from sources, so that no build brings it back."""
    with suppress(DataError):
        if not TokenStore.open(folder, verify=False).meta.sources:
            raise UsageError(
                f"{folder} was not made by `flatout data build`, and data.sources would replace it; leave data.sources "
                "out to train on it",
                [Fix({"data.name": free_folder(folder).name}, "another name")],
            )


def describe(
    config: DataConfig, name: str, tokenizer: TokenizerFacts, sources: Sequence[RowSource]
) -> tuple[StoreMeta, Content]:
    """Return what the store will be made from, and what decides its content, without the rules of the loss mask."""
    template = text = ""
    if config.template is not None or tokenizer.chat_template is not None:
        template, text = template_text(tokenizer, config.template, name)
    settings = config.model_dump(mode="json", exclude=_NOT_OF_TOKENS)
    where = {"path", "hub", "split", "subset", "revision", "unread_files"}
    content = {
        "version": _FINGERPRINT_VERSION,
        "content": [list(source.files.values()) for source in sources],
        # of a converter, the file's content counts, and which function of it
        "formats": [
            one.model_dump(exclude=where) | ({"format": one.converter.rpartition(":")[2]} if one.converter else {})
            for one in config.sources
        ],
        "tokenizer": tokenizer.digest,
        "template": text,
        "settings": settings,
    }
    meta = StoreMeta(
        name=config.name,
        fingerprint=_fingerprint(content),
        tokenizer=name,
        tokenizer_digest=tokenizer.digest,
        template=template,
        template_text=text,
        settings=settings,
        vocabulary_size=tokenizer.num_tokens,
        processor=processor_digest(name),
        sources=tuple(one.address or redacted(each.path) for one, each in zip(sources, config.sources, strict=True)),
    )
    return meta, content


def _fingerprint(content: Content) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _identity(meta: StoreMeta, content: Content) -> Content:
    """Return what a begun build must have been made from to go on with it.

    `on_bad_row` and too_long=error decide only whether a set is built: a build that they stopped goes on without them.
    """
    tokens = {name: value for name, value in meta.settings.items() if name != "on_bad_row"}
    tokens["too_long"] = "drop" if tokens["too_long"] == "error" else tokens["too_long"]
    return content | {"settings": tokens, "processor": meta.processor, "code": code_identity()["flatout"]}


def _open_built(config: DataConfig, name: str, log: Log) -> TokenStore:
    """Open a data set by its name in the registry, and check that it fits the settings that are given."""
    store = TokenStore.open(registry.entry_dir(config.root, registry.find(config.root, config.name)))
    tokenizer, template, text = tokenizer_facts(name, added=config.added_tokens, log=log), "", ""
    if config.template is not None:
        template, text = template_text(tokenizer, config.template, name)
    wanted = replace(
        store.meta,
        tokenizer=name,
        tokenizer_digest=tokenizer.digest,
        template=template,
        template_text=text or store.meta.template_text,
        settings=config.model_dump(mode="json", include=config.model_fields_set - _NOT_OF_TOKENS),
    )
    if store.meta.has_earlier_rules:
        log(f"data set {config.name!r} was built {_EARLIER}; build it again to train by today's")
    if change := _change(store.meta, wanted):
        raise DataError(f"data set {config.name!r} was built with {change}; rebuild it, or adapt the settings")
    return store


def _change(built: StoreMeta, wanted: StoreMeta) -> str:
    """Describe how the settings of two data sets differ ("max_tokens=2048, but 4096 is configured"); empty if equal."""
    changes = []
    if built.tokenizer_digest != wanted.tokenizer_digest:
        old, new = (f"{meta.tokenizer!r} with {len(meta.added_tokens)} new tokens" for meta in (built, wanted))
        digests = (meta.tokenizer_digest[:8] or "none" for meta in (built, wanted))
        is_same = f"{old} of digest {next(digests)}, but its digest is {next(digests)}"
        changes.append(f"tokenizer {is_same if old == new else f'{old}, but {new} is configured'}")
    if built.template_text and built.template_text != wanted.template_text:
        changes.append(f"chat template {built.template!r}, but {wanted.template!r} is configured")
    if built.processor and built.processor != processor_digest(wanted.tokenizer):
        changes.append(f"another image processor than {wanted.tokenizer!r} has now")
    if built.sources != wanted.sources:
        changes.append(f"rows of {', '.join(built.sources)}, but {', '.join(wanted.sources)} is configured")
    for name, asked in wanted.settings.items():
        if (had := built.settings.get(name, _DEFAULTS[name])) != asked:
            changes.append(f"{name}={had}, but {asked} is configured")
    return "; ".join(changes)


def _build(
    config: DataConfig,
    sources: Sequence[RowSource],
    tokenizer_name: str,
    described: tuple[StoreMeta, Content],
    folder: Path,
    progress: Progress,
    log: Log,
) -> None:
    meta, content = described
    to_tokens = tokenizer_for(config, meta, tokenizer_name)
    notes: list[str] = []

    def log_note(text: str) -> None:
        notes.append(printable(redacted(text)))
        log(notes[-1])

    num_procs = usable_procs(config.num_procs)
    if config.num_procs not in (None, num_procs):
        log_note(f"num_procs: {config.num_procs} lowered to {num_procs}, the most on this machine")
    readers = readers_of(config, sources, log_note)
    columns = own_columns(config, readers, log_note) or (PICTURES if meta.processor else {})
    copies, total = count_rows(config, readers)
    report = BuildReport(config, lambda: total if copies is not None else most_rows(readers))
    with (
        new_store(folder, to_tokens.num_ids, _identity(meta, content), report.restore, columns) as writer,
        _kept(writer, report, log),
    ):
        if report.num_chunks:
            log(f"going on from an earlier build, which finished {report.counts['rows']:,} rows")
        chunks = islice(read_chunks(readers, copies, report), report.num_chunks, None)
        on_chunk = timed(progress, log, report.counts["rows"], total)
        for chunk, read in tokenize_chunks(chunks, to_tokens, config.num_procs):
            done = without_repeated(read, report.seen)
            append_chunk(writer, chunk, done, report.files)
            report.add(chunk, done)
            if writer.is_full:
                writer.close_shard(report.new_records())
            on_chunk(report.counts["rows"])
        report.close(writer.num_samples, writer.num_distinct())
        labels = next((parser.options.classes for _, parser in readers if parser.options.classes), ())
        meta = replace(meta, max_token_id=writer.max_token_id, labels=labels)
        meta = _with_rows(meta, report, to_tokens, log_note)
        left_out = [f"{source.name}: {said}" for source in sources for said in source.notes()]
        for text in left_out + report.notes():
            log_note(text)
        writer.finish(meta, redacted(report.report(notes)), report.picture_files)


def tokenizer_for(config: DataConfig, meta: StoreMeta, tokenizer_name: str) -> SampleTokenizer:
    """Return what tokenizes the rows of a set that `describe` has described."""
    options = TokenizeOptions(meta.tokenizer, meta.template, meta.template_text if meta.template else None, config)
    return SampleTokenizer(options, tokenizer_of(config, tokenizer_name))


def readers_of(config: DataConfig, sources: Sequence[RowSource], log: Log) -> Readers:
    """Return each source with the parser of its rows, which `log` is told."""
    readers = with_classes(choose_parsers(sources, config.sources), log)
    if config.template == "plain":
        readers = [(one, replace(own, options=replace(own.options, joins=True))) for one, own in readers]
    for source, parser in readers:
        for text in filter(None, (f"{source.name}: {parser.summary}", source.held_out)):
            log(text)
    return readers


def _with_rows(meta: StoreMeta, report: BuildReport, to_tokens: SampleTokenizer, log: Log) -> StoreMeta:
    """Return what a set records of its rows and, if it has conversations, of its template, which `log` is told."""
    has_chats = bool(report.counts["conversations"])
    is_rendered = has_chats and not to_tokens.joins_texts
    meta = replace(
        meta,
        files=tuple(map(redacted, report.files)),
        counts=dict(report.counts),
        processor=meta.processor if report.counts["pictures"] else "",
        template=meta.template if is_rendered else "",
        template_text=meta.template_text if is_rendered else "",
    )
    if not is_rendered:
        if has_chats:
            log("the texts of turns are joined as they stand, markers are tokens, and no chat template is applied")
        return meta
    for text in to_tokens.description.summary_lines():
        log(text)
    return replace(
        meta,
        end_of_turn=to_tokens.masker.end_of_turn(),
        template_facts=to_tokens.description,
        mask_rules=token_store.MASK_RULES,
        fingerprint=with_mask_rules(meta.fingerprint, token_store.MASK_RULES),
    )


@contextmanager
def _kept(writer: StoreWriter, report: BuildReport, log: Log) -> Iterator[None]:
    """Keep what is tokenized when the set is refused, for a build that differs only in what refused it."""
    try:
        yield
    except DataError:
        if writer.num_open_tokens >= _WORTH_KEEPING_TOKENS:
            writer.close_shard(report.new_records())
        if writer.shards:
            log(f"{report.counts['rows']:,} rows are tokenized; a build that allows it continues from there")
        raise


def read_chunks(readers: Readers, copies: list[NDArray[np.int32]] | None, report: BuildReport) -> Iterator[Chunk]:
    """Yield the rows of all sources, each used as often as `copies` says (None: once), and what could not be read."""
    problems: list[Problem] = []

    def bad_row(error: DataError) -> None:
        problems.append((error.text, error.fixes))
        report.check_unread(problems)

    for index, (source, parser) in enumerate(readers):
        rows = source.rows(bad_row, parse=False)
        uses: Iterable[int] = repeat(1) if copies is None else copies[index]
        used = ((row, int(count)) for row, count in zip(rows, uses, strict=False) if count)
        while (batch := list(islice(used, ROWS_PER_CHUNK))) or problems:
            counts = np.array([count for _, count in batch], dtype=np.int32)
            chunk = Chunk(parser, tuple(row for row, _ in batch), counts, tuple(problems))
            problems.clear()
            yield chunk
