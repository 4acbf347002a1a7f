"""The record of a GPU run: what a tiny suite gives, and that nothing is written where the suite cannot run."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_suite.py"
FIRST = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("size", [1, 2])
def test_passes(size):
    pass

def test_fails():
    assert [1, 2] == [1, 3], "the sums differ"

def test_needs_four():
    pytest.skip("1 GPUs")
"""
SECOND = """
import os
import pytest

@pytest.fixture
def broken():
    raise OSError("no such device")

@pytest.mark.gpu
def test_cannot_start(broken):
    pass

@pytest.mark.gpu
def test_dies():
    os._exit(3)

def test_of_the_cpu():
    assert False
"""


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("gpu_suite")


def test_every_end_of_a_test_is_counted_with_its_reason(suite: Any, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    (tmp_path / "test_torn.py").write_text("def test_")
    record = suite.summarise(suite.run_suite(tmp_path, 2, tmp_path / "junit.xml"))
    assert record["counts"] == {"passed": 2, "failed": 1, "skipped": 1, "error": 3}
    reasons = {failure["test"]: failure["reason"] for failure in record["failures"]}
    assert set(reasons) == {
        "test_first.py::test_fails",
        "test_second.py::test_cannot_start",
        "test_second.py::test_dies",
        "test_torn.py::test_torn",
    }
    assert "the sums differ" in reasons["test_first.py::test_fails"]
    assert "no such device" in reasons["test_second.py::test_cannot_start"]
    assert "crashed" in reasons["test_second.py::test_dies"]
    assert "SyntaxError" in reasons["test_torn.py::test_torn"]
    assert record["skips"] == {"1 GPUs": 1}
    assert set(record["file_seconds"]) == {"test_first.py", "test_second.py", "test_torn.py"}


def test_a_suite_without_gpu_tests_is_no_run(suite: Any, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        suite.run_suite(tmp_path, 1, tmp_path / "junit.xml")
    assert stopped.value.code == 2
    assert "gpu_suite: pytest ended with code 5" in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing() -> None:
    before = (ROOT / "benchmarks/results/gpu-suite.json").exists()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_suite: no GPU is visible")
    assert (ROOT / "benchmarks/results/gpu-suite.json").exists() == before


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_this_checkouts_and_a_changed_file_makes_it_dirty(
    suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "results").mkdir()
    for name in ("code.py", "results/record.json"):
        (tmp_path / name).write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "OUT", tmp_path / "results" / "record.json")
    (tmp_path / "results/record.json").write_text("2")
    assert suite.git_state() == (git("rev-parse", "HEAD"), False)
    (tmp_path / "code.py").write_text("2")
    assert suite.git_state()[1] is True
