"""What every case starts from: a tiny model, a built data set and a finished run, copied into the case's folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

NUM_ROWS = 16
CASES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))
SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "run_dir": "run",
    "device": "cpu",
    "seed": 7,
    "model": {"name": "model", "precision": "fp32"},
    "data": {"name": "chats", "root": "data", "sources": [{"path": "chats.jsonl"}], "max_tokens": 400, "num_procs": 1},
    "lora": {"rank": 2, "alpha": 4},
    "batch": {"samples_per_step": 2, "micro_batch_tokens": 500, "max_steps": 2},
    "optim": {"lr": 1e-3},
    "checkpoint": {"every_steps": 1},
}


class World:
    """`root` holds model/, chats.jsonl, data/ (with the built set `chats`), run/ (finished LoRA) and run.yaml."""

    def __init__(self, root: Path, model_dir: Path, chats: Path) -> None:
        """Builds all by the command line. `model_dir` and `chats` are the tests' tiny model and conversations."""
        from flatout.cli.main import main

        self.root = root
        shutil.copytree(model_dir, root / "model")
        rows = chats.read_text(encoding="utf-8").splitlines(keepends=True)
        (root / "chats.jsonl").write_text("".join(rows[:NUM_ROWS]), encoding="utf-8")
        (root / "run.yaml").write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
        here = Path.cwd()
        os.chdir(root)
        try:
            assert main(["train", "run.yaml"]) == 0
            # all that verbs import is imported once, here
            assert main(["chat", "run", "--prompt", "Hi.", "--max-new-tokens", "1"]) == 0
            assert main(["plan", "run.yaml", "--device", "h100"]) == 0
            assert main(["data", "show", "chats", "-n", "1"]) == 0
        finally:
            os.chdir(here)

    def put(self, *names: str) -> Callable[[Path], None]:
        """A maker of a case's folder: these files and folders of the world."""

        def make(here: Path) -> None:
            for name in names:
                if (self.root / name).is_dir():
                    # what spoils a file writes a new one; a run's files are appended to
                    copy = shutil.copy2 if name == "run" else os.link
                    shutil.copytree(self.root / name, here / name, symlinks=True, copy_function=copy)
                else:
                    shutil.copyfile(self.root / name, here / name)

        return make

    def json(self, name: str) -> Any:
        """A JSON file of the world."""
        return json.loads((self.root / name).read_text(encoding="utf-8"))


def settings(**sections: Any) -> dict[str, Any]:
    """SETTINGS with these on top, section by section."""
    changed = {**SETTINGS}
    for name, value in sections.items():
        changed[name] = {**changed.get(name, {}), **value} if isinstance(value, dict) else value
    return changed


def both(*makers: Callable[[Path], object]) -> Callable[[Path], None]:
    """One maker after the other."""

    def make(here: Path) -> None:
        for maker in makers:
            maker(here)

    return make
