"""Every script can be imported, and what a page quotes beside a figure takes real steps on a CPU."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import preference
import pytest
import throughput

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in ROOT.joinpath("benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_imported(name):
    importlib.import_module(name)


def run(script: str, *words: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def test_rows_are_measured_in_processes_of_their_own_and_compared_with_the_first(tmp_path, monkeypatch, capfd):
    words = ["--rows", "full-fp32,packed", "--shape", "tiny", "--steps", "4", "--samples", "2", "--lengths", "chain"]
    script = str(ROOT / "benchmarks" / "throughput.py")
    monkeypatch.setattr(sys, "argv", [script, *words, "--out", str(tmp_path), "device=cpu", "compile=off"])
    throughput.main()
    lines = capfd.readouterr().out.splitlines()
    full, packed, compared = (json.loads(line) for line in lines if line.startswith("{"))
    assert (full["row"], packed["row"]) == ("full-fp32", "packed")
    assert len(full["losses"]) == len(packed["losses"]) == 4
    assert full["losses"][0] == packed["losses"][0] == pytest.approx(6.93, abs=0.1)
    assert 0 < full["tokens_per_s"] < full["bound_tokens_per_s"]
    assert "bound_tokens_per_s" not in packed
    assert compared == {
        "packed": {
            "speed": pytest.approx(packed["tokens_per_s"] / full["tokens_per_s"], abs=1e-3),
            "worst_difference": pytest.approx(
                abs(sum(packed["losses"]) - sum(full["losses"])) / sum(full["losses"]), abs=1e-5
            ),
        }
    }


@pytest.mark.slow
def test_pairs_are_measured_with_their_reference_and_another_rate_computes_none(tmp_path):
    words = ["--rows", "bf16,again", "--shape", "tiny", "--pairs", "2", "--steps", "1", "--out", str(tmp_path)]
    told = run("preference.py", *words, "device=cpu", "compile=off")
    results = json.loads((tmp_path / "preference.json").read_text())
    first, again = results["bf16"], results["again"]
    assert first["losses"][0] == again["losses"][0] == pytest.approx(math.log(2), abs=1e-12)
    assert "cached for other runs" in first["told"][0]
    assert "are known from an earlier run" in again["told"][0]
    lengths = preference.parse(words).timed
    shared = lengths[lengths[:, 0] >= 64, 0].sum()  # a shorter prompt is not worth sharing
    assert first["computed_tokens"] == pytest.approx(lengths.sum() + lengths[:, 0].sum() - shared, rel=0.01)
    assert "| flatout bf16 |" in told


def test_padded_tokens_are_those_of_the_longest_answer_of_a_micro_batch():
    lengths = np.array([[10, 5, 7], [20, 1, 2], [3, 3, 3], [1, 30, 2]])
    assert preference.padded_tokens(lengths, 1) == 2 * (17 + 22 + 6 + 31)
    assert preference.padded_tokens(lengths, 2) == 4 * (22 + 31)


def test_a_row_is_words_of_the_command_and_the_given_ones_win():
    args = throughput.parse(["--rows", "8b-nf4-full", "--budget", "512", "recompute=none"])
    assert (args.shape, args.budget) == ("qwen3-8b", 512)
    assert args.overrides == ["recompute=full", "base.storage=nf4", "recompute=none"]


def test_every_group_names_rows_and_another_name_is_refused(capsys):
    for name in throughput.GROUPS:
        assert set(throughput.parse(["--rows", name]).rows) <= set(throughput.ROWS)
    with pytest.raises(SystemExit):
        throughput.parse(["--rows", "full-fp31"])
    assert "there is no full-fp31" in capsys.readouterr().err


def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one():
    told = run("kills.py", "--kills", "1", "--steps-per-kill", "4")
    assert "model.safetensors: equal to the bit" in told
    assert "1 of 1 kills resumed" in told


def test_every_command_that_a_page_quotes_names_a_script_with_its_options():
    # the lab's notes also name scripts that never were part of the repository
    pages = [ROOT / "README.md", *(page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "lab")]
    known = throughput.GROUPS.keys() | throughput.ROWS.keys()
    for page in pages:
        for line in page.read_text(encoding="utf-8").splitlines():
            for part in line.split("python benchmarks/")[1:]:
                script, *words = part.split("`")[0].split()
                assert (ROOT / "benchmarks" / script).is_file(), f"{page}: {line}"
                if script == "throughput.py" and "--rows" in words:
                    assert set(words[words.index("--rows") + 1].split(",")) <= known, f"{page}: {line}"
