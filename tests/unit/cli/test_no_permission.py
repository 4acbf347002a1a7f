"""Users without a home, and paths that may not be read or written: one sentence, or a run that needs none of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMANDS = """
import contextlib, io, json, sys
from flatout.cli.main import main
for argv in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(argv)
    print(json.dumps([code, said.getvalue()]))
"""
# root may read everything; in a user namespace of its own it is somebody without a name
NOBODY = ["unshare", "-U", "--map-user=54321", "--map-group=54321"]


def as_nobody(commands: list[list[str]], cwd: Path, **env: str) -> list[tuple[int, str]]:
    """Run commands in one process whose user has no name and no home; return exit codes and what they say."""
    if (
        shutil.which("unshare") is None
        or subprocess.run([*NOBODY, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("user namespaces are not allowed here")
    done = subprocess.run(
        [*NOBODY, sys.executable, "-c", COMMANDS], input=json.dumps(commands), cwd=cwd, text=True, capture_output=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(cwd / "tmp"), **env},
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.fixture
def here(tiny, tmp_path):
    (tmp_path / "tmp").mkdir()
    shutil.copy(tiny.chats, tmp_path / "chats.jsonl")
    return tmp_path


def words(model: Any, name: str, *more: str) -> list[str]:
    settings = ["device=cpu", "batch.max_steps=1", "batch.samples_per_step=2", "eval.prompts=[]", *more]
    return ["train", f"model={model}", "data=chats.jsonl", f"run_dir=runs/{name}", *settings]


def test_paths_without_permission_are_named_in_one_sentence_and_a_user_without_a_home_trains(tiny, here):
    locked = here / "locked"
    locked.mkdir()
    paths = [
        ["data", "build", "locked/x.jsonl", "--tokenizer", str(tiny.model_dir), "--name", "d", "--root", "data"],
        ["data", "build", "chats.jsonl", "--tokenizer", "locked", "--name", "d", "--root", "data"],
        ["data", "build", "chats.jsonl", "--tokenizer", str(tiny.model_dir), "--name", "d", "--root", "locked"],
        ["data", "list", "--root", "locked"],
        ["chat", "locked", "--prompt", "hi"],
        ["init", "locked/a.yaml"],
        ["convert", "locked/a.yaml"],
        ["train", "locked/run.yaml"],
        words(tiny.model_dir, "b", "run_dir=locked"),
        words(tiny.model_dir, "b", "run_dir=locked/in"),
        words("locked", "b"),
        words(tiny.model_dir, "b", "data.root=locked"),
        words(tiny.model_dir, "x" * 300),
    ]
    cached = words(tiny.model_dir, "c")
    locked.chmod(0)
    try:
        told = as_nobody([*paths, cached], here, XDG_CACHE_HOME=str(locked))
    finally:
        locked.chmod(0o700)
    for argv, (code, said) in zip(paths, told, strict=False):
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert (code in (2, 3, 6), len(errors)) == (True, 1), (argv, said)
        assert "ermission denied" in errors[0] or "File name too long" in errors[0], (argv, said)
        assert "locked" in errors[0] or "xxx" in errors[0]
    assert told[-1][0] == 0, "a cache that may not be read is left out"
    assert (here / "runs" / "c" / "final").is_dir()
    allowed = as_nobody([paths[3], paths[2], words(tiny.model_dir, "a")], here)
    assert [code for code, _ in allowed] == [0, 0, 0], allowed
    assert (here / "runs" / "a" / "final").is_dir()
    assert [path.name for path in (here / "tmp").iterdir() if path.name.startswith("flatout-")]
