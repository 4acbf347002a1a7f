"""Every file of a checkpoint damaged in five ways: never accepted, always named, the one before it is used."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from faulty_disk import QuickDisk, same, snapshot_of

from flatout.checkpoint.write import Checkpoints
from flatout.io.durable_io import DurableIO

FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def _truncate(path: Path, older: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip_a_bit(path: Path, older: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


def _delete(path: Path, older: Path) -> None:
    path.unlink()


def _swap_with_older(path: Path, older: Path) -> None:
    shutil.copyfile(older, path)


def _zero(path: Path, older: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


WAYS = [_truncate, _flip_a_bit, _delete, _swap_with_older, _zero]


@pytest.fixture
def run_dir(tmp_path):
    saves = Checkpoints(tmp_path, keep=2, on_event=lambda kind, facts: None, durable_io=DurableIO(QuickDisk()))
    saves.save(snapshot_of(1))
    saves.save(snapshot_of(2))
    return tmp_path


def load(run_dir: Path) -> tuple[object, list[tuple[str, Mapping[str, Any]]]]:
    events: list[tuple[str, Mapping[str, Any]]] = []

    def on_event(kind: str, facts: Mapping[str, Any]) -> None:
        events.append((kind, facts))

    return Checkpoints(run_dir, keep=2, on_event=on_event, durable_io=DurableIO(QuickDisk())).newest(), events


@pytest.mark.parametrize("damage", WAYS)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_the_older_one_used(run_dir, name, damage):
    newer, older = run_dir / "checkpoints" / "step-2", run_dir / "checkpoints" / "step-1"
    damage(newer / name, older / name)
    found, events = load(run_dir)
    assert same(found, snapshot_of(1))  # type: ignore[arg-type]  # `object` is all that this file needs to know
    assert [kind for kind, _ in events] == ["refused", "fallback"]
    assert "step-2" in events[0][1]["why"]
    assert name in events[0][1]["why"] or "its manifest" in events[0][1]["why"]
    assert events[1][1]["step"] == 1


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_bit_anywhere_is_accepted(run_dir, name):
    path = run_dir / "checkpoints" / "step-2" / name
    whole = path.read_bytes()
    for place in range(0, len(whole), 31):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        found, events = load(run_dir)
        # a manifest may change in its blanks only, which changes nothing it says
        unharmed = name == "manifest.json" and whole[place] in b" \n" and not events
        assert same(found, snapshot_of(2 if unharmed else 1))  # type: ignore[arg-type]  # as above
