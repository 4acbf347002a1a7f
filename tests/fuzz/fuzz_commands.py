"""Every verb on disks that are full: what it calls done is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fuzz_judge import Case
from fuzz_world import World

_INPUTS = ("model", "data", "chats.jsonl", "run.yaml", "run")
_CHAT = ("chat", "run", "--prompt", "Hi.", "--max-new-tokens", "1")
_MERGE = ("merge", "run", "--out", "merged")


def disk_cases(world: World) -> Iterator[Case]:
    """The longest file that may be written: none, then a little more, up to enough."""
    commands = {
        "train": ("train", "run.yaml", "run_dir=new"),
        "train full": ("train", "run.yaml", "run_dir=new", "method=full", "lora={}"),
        "build": ("data", "build", "chats.jsonl", "--tokenizer", "model", "--name", "new", "--num-procs", "1"),
        "merge": _MERGE,
        "init": ("init", "new.yaml", "--model", "model", "--data", "chats.jsonl"),
        "launch": ("launch", "run.yaml", "--slurm", "--out", "job.sh"),
        "plan": ("plan", "run.yaml"),
        "chat": _CHAT,
        "schema": ("init", "new.json", "--schema"),
    }
    for name, argv in commands.items():
        for size in (0, 1, 500, 2000, 8000, 32_000, 128_000):
            yield Case(
                f"disk {name} {size}", argv, world.put(*_INPUTS), "either", keeps=("model", "data/built_dataset/chats", "chats.jsonl", "run"), disk_bytes=size,  # noqa: E501
                done=_whole_outputs,
            )  # fmt: skip


def _whole_outputs(here: Path, out: str) -> str | None:
    """What is called done is whole: no file of the outcome is empty."""
    folders = (here / "new/final", here / "merged", here / "data/built_dataset/new")
    empty = [
        file.name for folder in folders if folder.is_dir() for file in folder.rglob("*") if not file.stat().st_size
    ]
    return f"exit code 0 with empty files: {', '.join(empty)}" if empty else None
