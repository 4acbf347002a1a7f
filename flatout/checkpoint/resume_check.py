"""Decide whether a run may resume from a checkpoint, by settings, model, data and steps; no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.config.table import RESUME_EFFECTS, Effect
from flatout.errors import CheckpointError, Fix

ABSENT = "(absent)"
CHANGES_DATA = "changes the samples or their order"
CHANGES = {"objective": "changes the loss", "optim": "changes the updates", "rewards": "changes the scores"}


class OtherRunError(CheckpointError):
    """A folder holds another run than the one that is asked for; a fix would let it go on all the same."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that differs: its dotted key, both values (JSON), and the effect of the difference."""

    key: str
    saved: Any
    now: Any
    effect: Effect
    why: str

    def __str__(self) -> str:
        saved, now = _telling(self.saved, self.now), _telling(self.now, self.saved)
        return f"{self.key}: {_shown(saved)} in the checkpoint, {_shown(now)} now ({self.why})"


def _telling(value: Any, other: Any) -> Any:
    """Return a list of sections, such as data.sources, without the settings that are equal in every section of both."""
    if not (isinstance(value, list) and isinstance(other, list) and isinstance(next(iter(value), None), dict)):
        return value
    sections = [section for section in [*value, *other] if isinstance(section, dict)]
    return [
        {name: part for name, part in section.items() if any(part != twin.get(name) for twin in sections)}
        for section in value
    ]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return "; ".join(map(_shown, value))
    return value if isinstance(value, str) else json.dumps(value)


def numerics_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by key of which a change affects the numerics; `config` is as those of `config_changes`."""
    return {key: value for key, value in _leaves(config) if RESUME_EFFECTS.get(key, ("numerics", ""))[0] == "numerics"}


def config_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the settings that differ between a checkpoint's config and this run's, sorted by key.

    Both are nested dicts of JSON values (`Config.model_dump(mode="json")`); lists are compared whole. A key that is
    only in one of them is a change from or to "(absent)".
    """
    changes = []
    for key, before, after in _differences(dict(_leaves(saved)), dict(_leaves(now))):
        unknown = "changes the loss" if key.startswith("objective.") else "a setting that this flatout does not know"
        effect, why = RESUME_EFFECTS.get(key, ("numerics", unknown))
        changes.append(Change(key, before, after, effect, why))
    return changes


def fingerprint_changes(saved: Mapping[str, Any], now: Mapping[str, Any], settings: Sequence[Change]) -> list[Change]:
    """Return what differs in a checkpoint's fingerprints: the base model's files, the data, the plan, own code.

    Both map what was fingerprinted to JSON values, preferably objects with name, num_samples and fingerprint, and
    "model" to its files' hashes. A different plan only follows from other data, and from `settings` that are not
    harmless: these are refused or allowed under their own keys.
    """
    is_explained = any(change.effect != "harmless" for change in settings) or saved.get("data") != now.get("data")
    changes = []
    for key, before, after in _differences(saved, now):
        if key == "model":
            files, why = _differences(before, after), "changes weights or config"
            changes += [Change(f"model: {name}", old, new, "numerics", why) for name, old, new in files]
        elif key != "plan" or not is_explained:
            changes.append(Change(key, before, after, "numerics", CHANGES.get(key, CHANGES_DATA)))
    return changes


def refuse_changes(changes: Sequence[Change], allow: Sequence[str]) -> None:
    """Raise OtherRunError with all changes that affect the numerics and are not covered by `allow`.

    An entry of `allow` is a key, such as optim.lr, or a section, such as optim.
    """
    sections = tuple(f"{entry}{mark}" for entry in allow for mark in ".:")
    named = (change for change in changes if change.key not in allow and not change.key.startswith(sections))
    refused = [change for change in named if change.effect == "numerics"]
    if refused:
        lines = "".join(f"\n  - {change}" for change in refused)
        keys = list(dict.fromkeys(change.key.partition(":")[0] for change in refused))
        fix = Fix({"checkpoint.allow_change": keys}, "resume from the checkpoint with new settings")
        raise OtherRunError(f"what changes the numerics differs from the checkpoint's:{lines}", [fix])


def refuse_without_effect(changes: Sequence[Change], folder: Path) -> None:
    """Raise OtherRunError for changes of the numerics to a finished run, where they would have no effect."""
    lines = "".join(f"\n  - {change}" for change in changes if change.effect == "numerics")
    if lines:
        raise OtherRunError(f"{folder} is a finished run with different settings:{lines}")


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted(saved.keys() | now.keys()):
        before, after = saved.get(key, ABSENT), now.get(key, ABSENT)
        if before != after:
            yield key, before, after


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        key = prefix + name
        # a dict under a key of RESUME_EFFECTS is a value; any other dict is a section
        if isinstance(value, Mapping) and key not in RESUME_EFFECTS:
            yield from _leaves(value, key + ".")
        else:
            yield key, value
