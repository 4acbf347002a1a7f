"""Options of every verb, and disks that are full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fuzz_judge import Case
from fuzz_world import World, both

_INPUTS = ("model", "data", "chats.jsonl", "run.yaml", "run")
_CHAT = ("chat", "run", "--prompt", "Hi.", "--max-new-tokens", "1")
_MERGE = ("merge", "run", "--out", "merged")


def cases(world: World) -> Iterator[Case]:
    """A valid command with one more option or another word."""

    def here(folder: Path) -> None:
        (folder / "full").mkdir()
        (folder / "full/file").write_text("x")
        (folder / "empty").mkdir()
        (folder / "dangling").symlink_to("nowhere")

    made = both(world.put(*_INPUTS), here)
    keeps = ("model", "data/built_dataset", "chats.jsonl", "run/final", "run/checkpoints", "full")
    for argv in _REFUSED:
        yield Case(f"refused {' '.join(argv)[:90]!r}", argv, made, "refuse", keeps=keeps)
    for argv in _EITHER:
        yield Case(f"either {' '.join(argv)[:90]!r}", argv, made, "either", keeps=keeps)
    for argv in _ACCEPTED:
        yield Case(f"accepted {' '.join(argv)[:90]!r}", argv, made, "accept", keeps=keeps)


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


_REFUSED: tuple[tuple[str, ...], ...] = (
    (*_CHAT[:-1], "0"),
    (*_CHAT[:-1], "-1"),
    (*_CHAT[:-1], "x"),
    (*_CHAT, "--temperature", "-1"),
    (*_CHAT, "--temperature", "nan"),
    (*_CHAT, "--temperature", "inf"),
    (*_CHAT, "--temperature", "x"),
    (*_CHAT, "--seed", "x"),
    (*_CHAT, "--base", "nowhere"),
    (*_CHAT, "--base", "chats.jsonl"),
    (*_CHAT, "--base", "empty"),
    (*_CHAT, "--device", "zebra"),
    (*_CHAT, "--device-map", "zebra"),
    (*_CHAT, "--device-map", "run.yaml"),
    (*_CHAT, "--device-map", "empty"),
    ("report", "nowhere"),
    ("report", "empty"),
    ("report", "full"),
    ("report", "chats.jsonl"),
    ("report", "run", "run/."),
    ("report", "run", "--format", "pdf"),
    ("report", "run", "--out", "full"),
    ("data", "show", "chats", "--out", "page.html"),
    ("data", "show", "chats", "--html", "--out", "nowhere/page.html"),
    ("chat", "nowhere", "--prompt", "a"),
    ("chat", "empty", "--prompt", "a"),
    ("chat", "full", "--prompt", "a"),
    ("chat", "dangling", "--prompt", "a"),
    ("chat", "chats.jsonl", "--prompt", "a"),
    ("chat", "data", "--prompt", "a"),
    ("chat", "", "--prompt", "a"),
    ("chat", "x" * 5000, "--prompt", "a"),
    ("chat", "a/b/c", "--prompt", "a"),
    ("chat", "\ue000", "--prompt", "a"),
    ("merge", "model", "--out", "merged"),
    ("merge", "nowhere", "--out", "merged"),
    ("merge", "run", "--out", "full"),
    ("merge", "run", "--out", "chats.jsonl"),
    ("merge", "run", "--out", "chats.jsonl/x"),
    ("merge", "run", "--out", "/proc/x"),
    ("merge", "run", "--out", "model"),
    ("merge", "run", "--out", "run/final"),
    ("merge", "run", "--out", "dangling"),
    ("merge", "run", "--out", "x" * 300),
    ("merge", "run"),
    ("merge", "run", "--out", "merged", "--base", "empty"),
    ("data", "show", "nowhere"),
    ("data", "show", "../x"),
    ("data", "show", ""),
    ("data", "show", "chats", "-n", "x"),
    ("data", "show", "chats", "-n", "-1"),
    ("data", "show", "chats", "--root", "nowhere"),
    ("data", "show", "chats", "--root", "chats.jsonl"),
    ("data", "list", "--root", "chats.jsonl"),
    ("data",),
    ("data", "zebra"),
    ("plan",),
    ("plan", "run.yaml", "--ranks", "0"),
    ("plan", "run.yaml", "--ranks", "-1"),
    ("plan", "run.yaml", "--ranks", "x"),
    ("plan", "run.yaml", "--ranks", "99999999999"),
    ("plan", "run.yaml", "--step", "99"),
    ("plan", "run.yaml", "--step", "-1"),
    ("plan", "run.yaml", "--tokens-per-s", "0"),
    ("plan", "run.yaml", "--tokens-per-s", "nan"),
    ("plan", "run.yaml", "--tokens-per-s", "inf"),
    ("plan", "run.yaml", "--device", "zebra"),
    ("plan", "run.yaml", "--zebra"),
    ("train", "run.yaml", "--profile", "0"),
    ("train", "run.yaml", "--profile", "x"),
    ("train", "run.yaml", "--nnodes", "x"),
    ("train", "run.yaml", "--nnodes", "2"),
    ("train", "run.yaml", "--nnodes", "0", "--rdzv", "a:1"),
    ("train", "run.yaml", "--nnodes", "2", "--rdzv", "a:x"),
    ("train", "run.yaml", "--nnodes", "2", "--rdzv", "a:99999"),
    ("train", "run.yaml", "--nnodes", "2", "--rdzv", "a"),
    ("train", "run.yaml", "--nnodes", "3:2", "--rdzv", "a:1"),
    ("train", "run.yaml", "--nnodes", "2", "--rdzv", "a:1", "--node-rank", "2"),
    ("train", "run.yaml", "--nnodes", "2", "--rdzv", "a:1", "--node-rank", "-1"),
    ("train", "run.yaml", "--node-rank", "1"),
    ("train", "run.yaml", "--rdzv", "a:1"),
    ("train", "run.yaml", "--dry-run"),
    ("train", "run.yaml", "--device-map", "auto"),
    ("train", "run.yaml", "--tmux", "", "--dry-run"),
    ("train", "run.yaml", "--tmux", "a:b", "--dry-run"),
    ("verify", "run.yaml", "--ranks", "0"),
    ("verify", "run.yaml", "--tolerance", "0"),
    ("verify", "run.yaml", "--tolerance", "nan"),
    ("launch", "run.yaml"),
    ("launch", "run.yaml", "--slurm", "--kubernetes"),
    ("launch", "run.yaml", "--slurm", "--nodes", "0"),
    ("launch", "run.yaml", "--slurm", "--gpus-per-node", "-1"),
    ("launch", "run.yaml", "--slurm", "--gpus-per-node", "0"),
    ("launch", "run.yaml", "--slurm", "--out", "full"),
    ("launch", "run.yaml", "--slurm", "--out", "nowhere/job.sh"),
    ("launch", "run.yaml", "--slurm", "--out", "run.yaml"),
    ("launch", "run.yaml", "--slurm", "--name", "a\nb"),
    ("launch", "run.yaml", "--slurm", "--time", "zebra"),
    ("launch", "run.yaml", "--slurm", "--partition", "a\nb"),
    ("launch", "run.yaml", "--kubernetes", "--name", "Not A Name"),
    ("launch", "run.yaml", "--kubernetes", "--mount", "relative"),
    ("init", "run.yaml"),
    ("init", "full"),
    ("init", "nowhere/x.yaml"),
    ("init", "/proc/x.yaml"),
    ("init", "new.yaml", "--data", "nowhere.jsonl"),
    ("init", "new.yaml", "--data", ""),
    ("init", "new.yaml", "--model", ""),
    ("doctor", "nowhere.yaml"),
    ("doctor", "run.yaml", "seed=x"),
    ("demo", "--out", "chats.jsonl"),
    ("demo", "--out", "/proc/x"),
    ("demo", "--seed", "x"),
    ("bench", "--rows", "zebra"),
    ("bench", "--steps", "0"),
    ("bench", "--repeats", "-1"),
    ("bench", "--peers", "nowhere", "--list"),
    ("bench", "--peers", "full", "--list"),
    ("bench", "--rows", "tiny", "--parity", "nowhere.json"),
    ("bench", "--rows", "tiny", "--out", "chats.jsonl"),
    ("zebra",),
    ("--zebra",),
)
_EITHER: tuple[tuple[str, ...], ...] = (
    ("chat", "run", "--prompt", ""),
    ("chat", "run", "--prompt", "\ud800"),
    ("chat", "run", "--prompt", "\x1b[31m", "--max-new-tokens", "1"),
    ("chat", "run", "--prompt", "x " * 3000, "--max-new-tokens", "1"),
    (*_CHAT, "--seed", "-1"),
    (*_CHAT, "--seed", "99999999999999999999999999"),
    (*_CHAT, "--temperature", "1e308"),
    (*_CHAT, "--temperature", "1e-308"),
    (*_CHAT[:-1], "99999999999999999999"),
    (*_CHAT, "--device-map", "auto"),
    ("plan", "run.yaml", "--ranks", "1000"),
    ("plan", "run.yaml", "--tokens-per-s", "1e-300"),
    ("plan", "run.yaml", "--json", "--device", "h100"),
    ("data", "show", "chats", "-n", "0"),
    ("data", "show", "chats", "-n", "99999999999"),
    ("data", "list", "--root", "nowhere"),
    ("doctor", "run.yaml"),
    ("doctor", "run.yaml", "run_dir=/proc/x"),
    ("doctor", "run.yaml", "run_dir=chats.jsonl"),
    ("doctor", "run.yaml", "model.name=nowhere"),
    ("doctor", "run.yaml", "data.root=chats.jsonl"),
    ("merge", "run", "--out", "empty"),
    ("train", "run.yaml", "--tmux", "#(touch X)", "--dry-run"),
    ("train", "run.yaml", "--tmux", "x" * 3000, "--dry-run"),
)
_ACCEPTED: tuple[tuple[str, ...], ...] = (
    _CHAT,
    (*_CHAT, "--temperature", "1", "--seed", "3"),
    _MERGE,
    ("data", "show", "chats"),
    ("data", "show", "chats", "--html"),
    ("data", "list"),
    ("report", "run"),
    ("report", "run", "--format", "json", "--out", "run.json"),
    ("plan", "run.yaml"),
    ("plan", "run.yaml", "--json"),
    ("plan", "run.yaml", "--step", "0"),
    ("plan", "run.yaml", "--ranks", "2", "--device", "h200"),
    ("train", "run.yaml", "run_dir=new"),
    ("train", "run.yaml", "run_dir=new", "--profile", "1"),
    ("launch", "run.yaml", "--slurm"),
    ("launch", "run.yaml", "--kubernetes", "--out", "job.yaml"),
    ("init", "new.yaml", "--model", "model", "--data", "chats.jsonl"),
    ("init", "new.json", "--schema"),
)
