"""Sets of the hub by id: pinned to the commit that a branch was, and read without being downloaded whole."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from row_cases import read_in_a_process
from store_stand_in import COMMIT, Files, store_stand_in

from flatout.data.token_store import TokenStore

ROWS = [{"text": f"row {number} " + "word " * 40} for number in range(200)]
LATER = "beef" * 10


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


@pytest.fixture
def hub():
    with store_stand_in() as found:
        yield found


def variables_of(hub: Files, home: Path, **variables: str) -> dict[str, str]:
    """The environment in which a new process asks this hub."""
    others = ("HF_", "HUGGING_FACE", "FLATOUT_CHECK_AGAIN")
    env = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    env |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "XDG_CACHE_HOME": str(home)}
    return env | variables


FORKS = """
import json, os, sys
import datasets, pyarrow.parquet, tokenizers, transformers.tokenization_utils_tokenizers
import flatout.data.build
from flatout.cli.main import main
for line in sys.stdin:
    words, log = json.loads(line)
    if not (pid := os.fork()):
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1), os.dup2(fd, 2)
        sys.exit(main(words))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Commands:
    """`flatout`, each time in a new process; it is forked from one that has imported what reads the variables."""

    def __init__(self, log: Path, env: dict[str, str]) -> None:
        self.log = log
        command = [sys.executable, "-c", FORKS]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, words: list[str]) -> tuple[int, str]:
        """Return the exit code, and what the command said in one line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([words, str(self.log)]), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline()), " ".join(self.log.read_text().split())


def test_the_command_reads_a_set_at_the_commit_that_its_branch_is(hub, tmp_path, small_tokenizer_dir):
    """The commit is in the manifest and in each file's name; a branch that moved is said, and its rows are built."""
    home, root = tmp_path / "home", tmp_path / "data"
    readme = b"---\nlicense: mit\n---\n"
    hub.objects = {
        "org/set/README.md": readme,
        "org/set/data/train-00000-of-00002.parquet": table(ROWS[:120]),
        "org/set/data/train-00001-of-00002.parquet": table(ROWS[120:]),
        "org/set/data/test-00000-of-00001.parquet": table(ROWS[:3]),
    }
    words = ["data", "build", "org/set", "--tokenizer", str(small_tokenizer_dir), "--name", "d"]
    words += ["--root", str(root), "--num-procs", "1"]
    online = Commands(tmp_path / "log", variables_of(hub, home))
    offline = Commands(tmp_path / "log", variables_of(hub, home, HF_HUB_OFFLINE="1"))

    def built(*more: str, by: Commands = online) -> tuple[str, TokenStore]:
        hub.calls.clear()
        code, said = by.run([*words, *more])
        assert code == 0, said
        return said, TokenStore.open(root / "built_dataset" / "d")

    said, store = built()
    assert f"org/set[train]: commit {COMMIT}, 2 files" in said
    assert store.num_samples == 200
    assert store.meta.sources == (f"hf://datasets/org/set@{COMMIT}",)
    assert str(store.origin(199)) == f"hf://datasets/org/set@{COMMIT}/data/train-00001-of-00002.parquet:80"
    assert not any("data/test" in path and "/resolve/" in path for _, path, _ in hub.calls)
    kept_bytes = sum(path.stat().st_size for path in home.rglob("*") if path.is_file() and not path.is_symlink())
    assert kept_bytes < len(hub.objects["org/set/data/train-00000-of-00002.parquet"]), "nothing is downloaded whole"
    fingerprint = store.meta.fingerprint

    # a new page of the set is no new data
    hub.objects["org/set/README.md"], hub.commit = readme + b"hello", LATER
    said, store = built()
    assert f"main was commit {COMMIT}, and is {LATER} now" in said
    assert "Reusing" in said
    assert store.meta.fingerprint == fingerprint
    said, _ = built()
    assert "Reusing" in said
    assert not any("train-0000" in path for _, path, _ in hub.calls), "what a commit holds is known"

    # a hub that does not answer is no reason not to train
    said, _ = built(by=offline)
    assert "org/set[train]: the hub does not respond" in said
    assert "Reusing" in said
    code, said = offline.run([*words, "--replace", "--max-tokens", "10"])
    assert code == 6, said

    hub.objects["org/set/data/train-00001-of-00002.parquet"], hub.commit = table(ROWS[:7]), "a" * 40
    code, said = online.run(words)
    assert code == 2
    assert f"rows of hf://datasets/org/set@{COMMIT}, but hf://datasets/org/set@{'a' * 40} is configured" in said
    _, store = built("--replace")
    assert store.num_samples == 127
    assert store.meta.fingerprint != fingerprint
    for commands in (online, offline):
        commands.process.communicate()


def test_splits_subsets_and_sets_of_any_kind(hub, tmp_path):
    """What the set's page says of subsets holds; a set that only `datasets` reads is loaded at the same commit."""
    page = b"""---
configs:
- config_name: de
  data_files: [{split: train, path: de/*.gz}]
- config_name: en
  data_files: [{split: train, path: en.jsonl}]
- config_name: semi
  sep: ";"
  data_files: [{split: train, path: semi.csv}]
---
"""
    hub.objects = {
        "org/set/README.md": page, "org/set/de/a.jsonl.gz": gzip.compress(lines(ROWS[:3])),
        "org/set/en.jsonl": lines(ROWS[:5]), "org/set/validation.jsonl": lines(ROWS[:2]),
        "org/parts/train.jsonl": lines(ROWS), "org/parts/validation.jsonl": lines(ROWS[:4]),
        "org/texts/train.txt": b"one\ntwo\nthree\n",
        "org/semi/README.md": page.replace(b"de/*.gz", b"semi.csv").replace(b"en.jsonl", b"semi.csv"),
        "org/semi/semi.csv": b"text;n\na;1\nb;2\n",
    }  # fmt: skip
    asked: list[dict[str, Any]] = [
        {"path": "org/set", "subset": "de"},
        {"path": "org/set", "subset": "en", "revision": "v1"},
        {"path": "org/parts", "split": "validation"},
        {"path": "org/parts", "split": "train[:3]"},
        {"path": "org/texts"},
        {"path": "org/semi", "subset": "semi"},
        {"path": "org/parts", "split": "all"},
        {"path": "org/parts", "split": "dev"},
        {"path": "org/set", "subset": "fr"},
        {"path": "org/none"},
    ]
    told = [line[:5] for line in read_in_a_process(variables_of(hub, tmp_path), *asked)]
    at, address = f"hf://datasets/org/set@{COMMIT}", f"hf://datasets/org/parts@{COMMIT}"
    assert told[:3] == [
        [3, ROWS[0], f"{at}/de/a.jsonl.gz:3", None, at],
        [5, ROWS[0], f"{at}/en.jsonl:5", None, at],
        [4, ROWS[0], f"{address}/validation.jsonl:4", None, address],
    ]
    assert told[3:6] == [
        [3, ROWS[0], f"org/parts@{COMMIT}[train[:3]]:3", 3, f"org/parts@{COMMIT}"],
        [3, {"text": "one"}, f"org/texts@{COMMIT}[train]:3", 3, f"org/texts@{COMMIT}"],
        [2, {"text": "a", "n": 1}, f"org/semi@{COMMIT}[semi/train]:2", 2, f"org/semi@{COMMIT}"],
    ]
    assert told.pop(6)[0] == 204
    assert told[6] == [3, "org/parts[dev]: no split 'dev'; it has train, validation"]
    for code, text in told[7:]:
        assert code == 3
        assert "check path, subset, split and revision, and log in for a private set" in text
    assert any("/resolve/v1/" in path for _, path, _ in hub.calls)
    # where `datasets` reads it, the branch is asked once all the same
    assert sum("/org/texts/resolve/main/" in path for _, path, _ in hub.calls) == 1


def test_a_set_that_cannot_be_had_names_id_revision_and_the_way_offline(hub, tmp_path):
    asked = {"path": "org/gone", "subset": "en", "revision": "v9"}
    [[code, text]] = read_in_a_process(variables_of(hub, tmp_path, HF_HUB_OFFLINE="1"), asked)
    assert code == 3
    assert text.startswith("hub data set org/gone[en/train] (revision v9) cannot be loaded: ")
    assert "`hf download org/gone --repo-type dataset --local-dir DIR`" in text
