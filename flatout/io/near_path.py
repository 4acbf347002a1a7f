"""What a path that does not exist was meant to be, by the names that are there."""

from __future__ import annotations

import difflib
import json
import os
from contextlib import suppress
from pathlib import Path

# the least share of letters that two names without their endings have in common; short names have few to share
_CUTOFF, _SHORT, _SHORT_CUTOFF, _ENDING_CUTOFF = 0.6, 3, 0.5, 0.5


def expand_home(path: str | Path) -> Path:
    """Return a path whose `~` is the home folder; as it is if there is no such user, so that nothing is found there."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  (pathlib raises RuntimeError for a user who is not there)


def unknown_user(path: str | Path) -> str:
    """Return that the user of `~name/...` does not exist; else ""."""
    return f"there is no user {expand_home(path).parts[0][1:]}" if str(expand_home(path)).startswith("~") else ""


def has_rows(file: Path) -> bool:
    """Whether a path is a file that is not empty, and if it is JSON Lines begins with an object."""
    with suppress(OSError, ValueError):
        # a pipe would be waited for
        if not file.is_file():
            return False
        if file.suffix != ".jsonl":
            return file.stat().st_size > 0
        with file.open("rb") as lines:
            return isinstance(json.loads(lines.readline(1 << 20)), dict)
    return False


def files_of_rows() -> list[str]:
    """Return the files here that have rows, JSON Lines first."""
    there = [path for path in Path().iterdir() if path.suffix in (".jsonl", ".csv", ".parquet") and has_rows(path)]
    return [path.name for path in sorted(there, key=lambda path: (path.suffix != ".jsonl", path.name))]


def near_path(given: str | Path) -> Path | None:
    """Return the path that exists and has nearly these names, each in its place; None if one name is like no other."""
    path = expand_home(given)
    near = Path(path.anchor)
    try:
        for part in path.parts[len(near.parts) :]:
            name: str | None = part
            if not os.path.lexists(near / part):
                name = _nearest(part, [child.name for child in near.iterdir()])
            if name is None:
                return None
            near /= name
    except (OSError, ValueError):  # a file where a folder is named, a name too long, or one with a null byte
        return None
    return near if near != path else None


def _nearest(name: str, there: list[str]) -> str | None:
    """Return the name with the likest stem; of equal ones, that with the likest ending."""

    def likeness(other: str) -> tuple[float, float]:
        pairs = ((Path(name).stem, Path(other).stem), (Path(name).suffix, Path(other).suffix))
        stem, ending = (difflib.SequenceMatcher(None, mine, theirs).ratio() for mine, theirs in pairs)
        return stem, ending

    least = _SHORT_CUTOFF if len(Path(name).stem) <= _SHORT else _CUTOFF
    likenesses = {other: likeness(other) for other in there}
    near = [other for other, (stem, ending) in likenesses.items() if stem >= least and ending >= _ENDING_CUTOFF]
    return max(near, key=likenesses.__getitem__, default=None)


def other_model(given: str) -> str:
    """Return the end of an error on a model that is not there: a near folder, or those that are here; else ""."""
    if near := did_you_mean(given, is_folder=True):
        return near
    configs = Path().glob("*/config.json")
    here = sorted(str(file.parent) for file in configs if any(file.parent.glob("*.safetensors*")))
    return f"; model{'s' * (len(here) > 1)} here: {', '.join(here[:4])}" if here else ""


def did_you_mean(given: str | Path, *, is_folder: bool = False) -> str:
    """Return the end of an error on a path that does not exist: what is near; else ""."""
    near = near_path(given)
    return "" if near is None or (is_folder and not near.is_dir()) else f"; did you mean {near}?"
