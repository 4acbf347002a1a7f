"""Rows of a benchmark that compares trainers in fresh processes of its own script, each a `--part` of its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatout.environment import allocator_env


def run_part(
    name: str,
    words: Sequence[str],
    out: Path,
    *,
    left_s: float,
    launcher: Sequence[str] = (),
    paths: Sequence[Path] = (),
) -> list[dict[str, Any]]:
    """Run this script's command once more with `--part NAME` and more words; return what it told.

    It ends after `left_s` seconds. `launcher` goes before the script, and `paths` before the process's Python path. A
    part that fails is reported and stops no other.
    """
    began_s, path = time.time(), out / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    env = {**os.environ, **allocator_env(os.environ), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if paths:
        folders = [str(folder.resolve()) for folder in paths]
        env["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, *launcher, *sys.argv, "--part", name, f"--launched-s={began_s}", *words]
    try:
        subprocess.run(command, env=env, check=True, timeout=max(left_s, 1.0))
    except (subprocess.SubprocessError, OSError) as error:
        print(f"{name}: {str(error)[-200:]}", flush=True)
    print(f"{name}: {time.time() - began_s:.0f} s", flush=True)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def telling(name: str, out: Path, *, hidden: Sequence[str] = ()) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield what a part calls with its figures: each a JSON line for `run_part`, and one on the screen."""
    with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:

        def tell(figures: dict[str, Any]) -> None:
            file.write(json.dumps(figures) + "\n")
            file.flush()
            shown = {key: value for key, value in figures.items() if key not in hidden}
            print(json.dumps({"row": name, **shown}), flush=True)

        yield tell
