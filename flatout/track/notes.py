"""What a person writes beside a run: a note and tags, in notes.json of its folder, which training never touches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flatout.errors import DataError, UsageError
from flatout.io.durable_io import DurableIO

NOTES_FILE = "notes.json"
MAX_NOTE, MAX_TAGS = 4000, 20
_TAG = r"[\w.+-]{1,40}"


@dataclass(frozen=True, slots=True)
class RunNotes:
    """A run's note and its tags, sorted."""

    note: str = ""
    tags: tuple[str, ...] = ()


def write_notes(
    folder: Path, old: RunNotes, *, note: str | None = None, add: Sequence[str] = (), remove: Sequence[str] = ()
) -> RunNotes:
    """Change a run's note and tags, while it trains too, and return them. An empty note removes it.

    Raises UsageError for a note or tag that cannot be one, or a tag to remove that the run has not; ResourceError.
    """
    tags = [tag.strip() for tag in add]
    # `track.tags` may hold longer ones, and more
    new = [tag for tag in tags if tag not in old.tags]
    if (wrong := next((tag for tag in new if re.fullmatch(_TAG, tag) is None), None)) is not None:
        raise UsageError(f"tag {wrong!r:.80}: use up to 40 letters, digits, dots, dashes, underscores and plus signs")
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
