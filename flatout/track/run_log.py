"""Reads a run folder, of a finished run or of one that still writes, and writes a person's notes beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import SEEK_END
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from flatout.config.folders import RUN_NAME, is_run_folder
from flatout.errors import DataError, UsageError
from flatout.io.durable_io import DurableIO
from flatout.io.file_lock import Holder, holder_of, last_holder_of
from flatout.io.json_file import read_json, validated
from flatout.io.redact import cleaned
from flatout.track.record import (
    KINDS,
    Answer,
    AnswersRecord,
    EvalRecord,
    HeldOutRecord,
    Record,
    RoundRecord,
    RunEnd,
    RunStart,
    StepRecord,
    WorstSample,
)

_RECORDS: Mapping[str, TypeAdapter[Any]] = {kind: TypeAdapter(record_type) for kind, record_type in KINDS.items()}


@dataclass(frozen=True, slots=True)
class RunNotes:
    """What a person writes beside a run, in notes.json of its folder, which training never touches."""

    note: str = ""
    tags: tuple[str, ...] = ()
    """Sorted."""


PICTURES_FILE, NOTES_FILE = "pictures.jsonl", "notes.json"
MAX_NOTE, MAX_TAGS = 4000, 20
_TAG = r"[\w.+-]{1,40}"
Shown = TypeVar("Shown", Answer, WorstSample)
Content = TypeVar("Content")
_REPAIR = "repair the file, or move it away"
# no figure of a run is so great: a line with a greater one is damaged
MAX_NUMBER = 1e24
# bytes read at once while catching up with a long file
BLOCK_BYTES = 1 << 22


class LineFollower:
    """Reads new complete lines of a JSON Lines file that another process appends to. `offset` is in bytes.

    A file that does not exist yet has no lines; a line that is still being written is read later; a file that became
    shorter is read again from its start. Lines that are not JSON objects are counted in `num_bad` and left out.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset, self.num_bad = path, offset, 0

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of all lines since the last call; `offset` is after the line just yielded."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            if file.seek(0, SEEK_END) < self.offset:
                self.offset = 0
            file.seek(self.offset)
            rest = b""
            while block := file.read(BLOCK_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    self.offset += len(line) + 1
                    try:
                        content = cleaned(from_json(line, allow_inf_nan=False))
                    except ValueError:
                        content = None
                    if isinstance(content, dict):
                        yield content
                    else:
                        self.num_bad += 1


class RecordedPictures:
    """The small copies of pictures in a run folder: PICTURES_FILE has each once, and records there name it by `id`."""

    def __init__(self, folder: Path) -> None:
        self._lines, self._copies = LineFollower(folder / PICTURES_FILE), dict[str, str]()

    def ids(self) -> set[str]:
        """Return the names of all copies that are there by now."""
        self._copies |= {str(line.get("id")): str(line.get("copy")) for line in self._lines.new_lines()}
        return set(self._copies)

    def put_into(self, record: Record) -> Record:
        """Return a record with the copies that it names; one that is lost is left out.

        A record of an earlier version holds its copies itself, as data URIs, and stays as it is.
        """
        if isinstance(record, EvalRecord):
            return replace(record, worst=tuple(map(self._filled, record.worst)))
        if isinstance(record, AnswersRecord):
            return replace(record, answers=tuple(map(self._filled, record.answers)))
        return record

    def _filled(self, one: Shown) -> Shown:
        if not self._copies.keys() >= set(one.pictures):
            self.ids()
        copies = (self._copies.get(name, name) for name in one.pictures)
        return replace(one, pictures=tuple(copy for copy in copies if copy.startswith("data:")))


@dataclass(kw_only=True)
class SideFiles:
    """What a run folder holds in one file each."""

    start: RunStart | None = None
    """None before the run's first step."""
    end: RunEnd | None = None
    """None while it runs or after a kill; a run that was started again has the older end until its first step."""
    notes: RunNotes = field(default_factory=RunNotes)
    problems: Mapping[str, str] = field(default_factory=dict)
    """What is wrong with each of start.json, end.json and notes.json that could not be read."""


@dataclass
class RunLog(SideFiles):
    """Everything that a run folder says so far."""

    folder: Path
    steps: list[StepRecord] = field(default_factory=list)
    """Ascending; a repeated step replaced the older one. So are evaluations and answers."""
    evals: list[EvalRecord] = field(default_factory=list)
    answers: list[AnswersRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    held_out: list[HeldOutRecord] = field(default_factory=list)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    """Lines of events.jsonl: `time`, `kind` and facts."""
    num_bad_lines: int = 0
    """Lines that could not be read."""
    holder: Holder | None = None
    """Who holds the folder now."""
    last_holder: Holder | None = None
    """Who held it last."""

    @property
    def by_kind(self) -> dict[str, list[Any]]:
        """Its records, as KINDS names them."""
        own = (self.steps, self.evals, self.answers, self.rounds, self.held_out)
        return dict(zip(KINDS, own, strict=True))

    @property
    def state(self) -> str:
        """running, complete, stopped, failed, killed, damaged: its start.json or end.json cannot be read, or not ended:
        on another host, whose lock may be unseen here."""
        if self.holder is not None and self.holder.trains:
            return "running"
        if self.problems.keys() & {"start.json", "end.json"}:
            return "damaged"
        if self.end is not None:
            return self.end.outcome
        return "killed" if self.last_holder is not None and self.last_holder.is_local else "not ended"


class RunFollower:
    """Follows a run folder: `poll` reads what is new into `log` and `newest`, and returns if there was anything."""

    def __init__(self, folder: Path, *, from_end: bool = False) -> None:
        """Raises DataError for a folder that is not a run's; `from_end` leaves out what is there by now."""
        if not is_run_folder(folder):
            raise DataError(f"{folder} is not a run folder: it has no {RUN_NAME} of flatout; name the folder of a run")
        self.log = RunLog(folder)
        paths = [folder / f"{name}.jsonl" for name in ("metrics", "answers", "events")]
        self._files = [LineFollower(path, path.stat().st_size if from_end and path.exists() else 0) for path in paths]
        self._pictures, self._num_unknown = RecordedPictures(folder), 0
        self.newest: list[Record | Mapping[str, Any]] = []

    def news(self) -> Iterator[Record | Mapping[str, Any]]:
        """Yield the records since the last call, with their pictures, and the lines of events."""
        for file in self._files:
            for line in file.new_lines():
                if file.path.name == "events.jsonl":
                    yield line
                elif (record := record_of(line)) is not None:
                    yield self._pictures.put_into(record)
                else:
                    self._num_unknown += 1

    def poll(self) -> bool:
        """Read what is new."""
        log = self.log
        # first, so that no line is missed that was written before the end, and no end of a run that lets go now
        log.holder, log.last_holder = holder_of(log.folder), last_holder_of(log.folder)
        side = read_side_files(log.folder)
        kinds = {KINDS[kind]: records for kind, records in log.by_kind.items()}
        self.newest = list(self.news())
        for one in self.newest:
            if isinstance(one, Mapping):
                log.events.append(one)
                continue
            # a resumed run repeats steps after its checkpoint
            while (records := kinds[type(one)]) and records[-1].step >= one.step:
                records.pop()
            records.append(one)
        has_news = bool(self.newest) or vars(log) | vars(side) != vars(log)
        vars(log).update(vars(side))
        log.num_bad_lines = sum(file.num_bad for file in self._files) + self._num_unknown
        return has_news


def read_run(folder: Path) -> RunLog:
    """Read a run folder as it is now. Raises DataError for a folder that is not a run's."""
    follower = RunFollower(folder)
    follower.poll()
    return follower.log


def record_of(line: Mapping[str, Any]) -> Record | None:
    """Return the record of one line of metrics.jsonl or answers.jsonl; None if it is none that this version knows."""
    adapter = _RECORDS.get(str(line.get("kind")))
    numbers = [value for value in line.values() if type(value) in (float, int)]
    if adapter is None or not -MAX_NUMBER < min(numbers, default=0) <= max(numbers, default=0) < MAX_NUMBER:
        return None
    try:
        record: Record = adapter.validate_python(line)
    except ValidationError:
        return None
    return record


def read_start(folder: Path) -> RunStart | None:
    """Return what start.json says; None without the file. Raises DataError for a file that flatout did not write."""
    return read_written(folder / "start.json", RunStart)


def read_end(folder: Path) -> RunEnd | None:
    """Return what end.json says; None without the file. Raises DataError for a file that flatout did not write."""
    return read_written(folder / "end.json", RunEnd)


def read_side_files(folder: Path) -> SideFiles:
    """Read start.json, end.json and notes.json; before a note or tag is written, the tags are those of `track.tags`."""
    facts, problems = dict[str, Any](), dict[str, str]()
    for name, kind in (("start.json", RunStart), ("end.json", RunEnd), (NOTES_FILE, RunNotes)):
        try:
            facts[name] = read_written(folder / name, kind)
        except DataError as error:
            problems[name] = str(error)
    start = facts.get("start.json")
    tags = start.settings.get("track.tags") if start else None
    given = RunNotes(tags=tuple(sorted(map(str, tags))) if isinstance(tags, list) else ())
    notes = facts.get(NOTES_FILE) or given
    return SideFiles(start=start, end=facts.get("end.json"), notes=notes, problems=problems)


def write_notes(
    folder: Path, *, note: str | None = None, add: Sequence[str] = (), remove: Sequence[str] = ()
) -> RunNotes:
    """Change a run's note and tags, while it trains too, and return them. An empty note removes it.

    Raises UsageError for a note or tag that cannot be one, or a tag to remove that the run has not; DataError for a
    notes.json that cannot be read, as it may hold a person's; ResourceError.
    """
    side = read_side_files(folder)
    if NOTES_FILE in side.problems:
        raise DataError(side.problems[NOTES_FILE])
    old, tags = side.notes, [tag.strip() for tag in add]
    # `track.tags` may hold longer ones, and more
    if wrong := [tag for tag in tags if tag not in old.tags and re.fullmatch(_TAG, tag) is None]:
        raise UsageError(
            f"tag {wrong[0]!r:.80}: use up to 40 letters, digits, dots, dashes, underscores and plus signs"
        )
    if unknown := sorted(set(remove) - set(old.tags)):
        has = f"it has {', '.join(old.tags)}" if old.tags else "it has none"
        raise UsageError(f"{folder} has no tag {unknown[0]!r:.80}; {has}")
    notes = RunNotes(old.note if note is None else note.strip(), tuple(sorted({*old.tags, *tags} - set(remove))))
    if len(notes.note) > MAX_NOTE:
        raise UsageError(f"the note has {len(notes.note):,} characters; {MAX_NOTE:,} are allowed: put more into a file")
    if len(notes.tags) > max(MAX_TAGS, len(old.tags)):
        raise UsageError(f"{folder} would have {len(notes.tags)} tags; {MAX_TAGS} are allowed: remove some")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; name that of a run")
    DurableIO().write_json(folder / NOTES_FILE, asdict(notes))
    return notes


def read_written(path: Path, kind: type[Content], repair: str = _REPAIR) -> Content | None:
    """Return what a JSON file of flatout says; None without the file. Raises DataError, which ends in `repair`."""
    try:
        return validated(kind, cleaned(read_json(path, DataError)), str(path), DataError)
    except DataError as error:
        # a run that starts again removes its end.json
        if path.exists():
            raise DataError(f"{error.text}; {repair}") from error
        return None
