"""A small data set with everything that a page of samples must show."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from flatout.cli.main import main

EVIL = "<b>bold</b> & \u202etxet\u2066 \u200b tab\there\nnext </script><script>alert(1)</script>"


@dataclass(frozen=True)
class DataSet:
    root: Path
    page: Path
    store: Path


@pytest.fixture(scope="session")
def data_set(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("data-page")
    rows = [json.loads(line)["messages"] for line in tiny.chats.read_text().splitlines()[:60]]
    rows[0] = [{"role": "user", "content": EVIL}, {"role": "assistant", "content": "Yes."}]
    rows[1] = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two three " * 400}]
    file = root / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    words = ["--tokenizer", str(tiny.model_dir), "--name", "chats", "--root", str(root), "--num-procs", "1"]
    assert main(["data", "build", str(file), *words, "--max-tokens", "300", "--too-long", "truncate"]) == 0
    page = root / "page.html"
    assert main(["data", "show", "chats", "--root", str(root), "--html", "--out", str(page), "-n", "5"]) == 0
    return DataSet(root, page, root / "built_dataset" / "chats")
