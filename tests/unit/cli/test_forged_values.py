"""Values that no file of flatout or of a tokenizer's author has: one sentence with file and field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flatout.cli.main import main
from flatout.config.read import dump_config

DEVICE = {"name": "a GPU", "memory_bytes": 80 << 30, "corrections": {}}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"memory_bytes": 10**400}, "memory_bytes"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"corrections": {"layers": {"scale": 1e300, "offset_bytes": 0}}}, "corrections.layers.scale"),
        ({"corrections": {"layers": {"scale": 1.0, "offset_bytes": -(10**30)}}}, "corrections.layers.offset_bytes"),
        ({"corrections": {"layers": {"scale": -1.0, "offset_bytes": 0}}}, "corrections.layers.scale"),
        ({"corrections": {"layers": {"scale": 0.01, "offset_bytes": 0}}}, "corrections.layers.scale"),
        ({"corrections": {"layers": {"scale": 40.0, "offset_bytes": 0}}}, "corrections.layers.scale"),
        ({"corrections": {"layers": {"scale": 1.0, "offset_bytes": 81 << 30}}}, "corrections.layers.offset_bytes"),
        ({"corrections": {"layers": {"scale": 0.5, "offset_bytes": 1 << 30}}}, None),
        ({}, None),
        ({"corrections": {"layers": {"scale": 1.1, "offset_bytes": -(2**20)}}}, None),
    ],
)
def test_a_forged_memory_record(
    tiny: Any, tmp_path: Path, change: dict[str, Any], field: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(dump_config(tiny.config(tmp_path / "run", batch={"micro_batch_tokens": None})))
    record = tmp_path / "memory.json"
    record.write_text(json.dumps(DEVICE | change))
    code = main(["plan", str(tmp_path / "run.yaml"), "--measured", str(record)])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert code == (0 if field is None else 2), said
    assert field is None or f"{record}: {field} is " in said


def test_an_end_token_that_the_vocabulary_lacks(tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("name", ["hang_s", "stall_s", "join_s", "long_phase_s"])
def test_seconds_have_a_bound(tiny: Any, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(dump_config(tiny.config(tmp_path / "run")))
    assert main(["plan", str(tmp_path / "run.yaml"), f"faults.{name}=1e300"]) == 2
    assert f"faults.{name}: " in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "run.yaml"), f"faults.{name}=3600"]) == 0
