"""TolerantStream that nobody reads never ends a run, through the command line as people start it."""

import json
import os
import subprocess
import sys

import pytest

from flatout.cli.main import main
from flatout.config.read import dump_config

WAYS = {"head": "| head -n 1", "head with two ranks": "| head -n 1", "closed with two ranks": ">&- 2>/dev/full"}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == "head with two ranks" else pytest.mark.exhaustive) for way in WAYS]
)
def test_training_goes_on_when_nobody_reads(tiny, tmp_path, way):
    more = {"gpus": [0, 1]} if "ranks" in way else {}
    config = tiny.config(tmp_path / "caf\u00e9", batch={"max_steps": 2}, **more)
    (tmp_path / "run.yaml").write_text(dump_config(config))
    command = f"set -o pipefail; {sys.executable} -m flatout train {tmp_path}/run.yaml {WAYS[way]}"
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = (config.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (config.folder / "final" / "adapter_model.safetensors").exists()


def test_samples_that_nobody_reads_any_more_are_not_rendered(tiny, tmp_path):
    words = ["--name", "chats", "--root", str(tmp_path), "--tokenizer", str(tiny.model_dir)]
    assert main(["data", "build", str(tiny.chats), *words]) == 0
    command = f"{sys.executable} -m flatout data"
    show = f"set -o pipefail && {command} show chats -n 120 --root {tmp_path} | head -n 1"
    ended = subprocess.run(["bash", "-c", show], capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("--- Sample 1")
    assert ended.stderr == "" or "Error" not in ended.stderr
