"""`flatout bench` end to end: the tiny shape on this machine, with a peer's folder."""

import json

import pytest

from flatout.cli.main import main


def test_rows_are_listed_without_torch(capsys):
    assert main(["bench", "--list"]) == 0
    assert "8b-fp8" in capsys.readouterr().out


def test_an_unknown_row_is_one_line(capsys, tmp_path):
    assert main(["bench", "--rows", "9b", "--out", str(tmp_path)]) == 2
    assert "--rows: no row '9b'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_tiny_row_is_measured(capsys, tmp_path):
    gate = tmp_path / "parity.json"
    gate.write_text(json.dumps({"green": {"bf16": True}}))
    argv = ["bench", "--rows", "tiny", "--steps", "4", "--repeats", "1", "--out", str(tmp_path / "out")]
    assert main([*argv, "--parity", str(gate)]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    (run,) = results["runs"]
    assert run["digest"] == results["inputs"]["tiny, 32 samples a step"]["digest"]
    assert len(run["losses"]) == len(run["steps_s"]) == 4
    # random weights over 1,024 tokens: the loss is near ln 1024
    assert run["losses"][0] == pytest.approx(6.93, abs=0.1)
    assert run["useful_tok_s"] > run["label_tok_s"] > 0
    assert "green" in (tmp_path / "out" / "results.md").read_text()
    assert (tmp_path / "out" / "results.svg").read_text().startswith("<svg")
    assert "useful tok/s" in capsys.readouterr().out
