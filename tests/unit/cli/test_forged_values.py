"""Values that no file of flatout or of a tokenizer's author has: one sentence with file and field."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from flatout.cli.main import main
from flatout.config.read import dump_config, make_config
from flatout.errors import ProblemsError

DEVICE = {"name": "a GPU", "memory_bytes": 80 << 30, "corrections": {}}


def layers(scale: float, offset_bytes: int) -> dict[str, Any]:
    return {"corrections": {"layers": {"scale": scale, "offset_bytes": offset_bytes}}}


FORGED: list[tuple[dict[str, Any], str]] = [
    ({"memory_bytes": 10**400}, "memory_bytes"),
    ({"memory_bytes": 0}, "memory_bytes"),
    *((layers(scale, 0), "corrections.layers.scale") for scale in (1e300, -1.0, 0.01, 40.0)),
    *((layers(1.0, size), "corrections.layers.offset_bytes") for size in (-(10**30), 81 << 30)),
]


def test_a_forged_memory_record(tiny, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(dump_config(tiny.config(tmp_path / "run", batch={"micro_batch_tokens": None})))
    record = tmp_path / "memory.json"
    command = ["plan", str(tmp_path / "run.yaml"), "--measured", str(record)]
    for change, field in FORGED:
        record.write_text(json.dumps(DEVICE | change))
        assert main(command) == 2
        assert f"{record}: {field} is " in capsys.readouterr().err
    for change in ({}, layers(0.5, 1 << 30), layers(1.1, -(2**20))):
        record.write_text(json.dumps(DEVICE | change))
        assert main(command) == 0


def test_an_end_token_that_the_vocabulary_lacks(tiny, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(tiny.model_dir, folder)
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"eos_token": "<|nowhere|>"}))
    command = ["data", "build", str(tiny.chats), "--tokenizer", str(folder), "--name", "x", "--num-procs", "1"]
    command += ["--root", str(tmp_path / "data"), "-n", "4"]
    assert main(command) == 3
    assert "names the end token '<|nowhere|>', which its vocabulary does not have" in capsys.readouterr().err
    file.write_text(json.dumps(content))
    assert main(command) == 0


def test_seconds_have_a_bound():
    for name in ("hang_s", "stall_s", "join_s", "long_phase_s"):
        with pytest.raises(ProblemsError, match=f"faults.{name}: "):
            make_config({"model": "m"}, [f"faults.{name}=1e300"])
        make_config({"model": "m"}, [f"faults.{name}=3600"])
