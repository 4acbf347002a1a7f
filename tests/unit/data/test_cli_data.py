from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatout.cli.main import main


@pytest.fixture
def built(tmp_path: Path, small_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"instruction": f"the question {i}", "input": "", "output": f"[b]yes {i}[/b]"} for i in range(20)]
    Path("rows.json").write_text(json.dumps(rows))
    return small_tokenizer_dir


def _build(tokenizer: Path, *more: str) -> int:
    return main(["data", "build", "rows.json", "--tokenizer", str(tokenizer), "--template", "chatml", *more])


def test_build_says_what_hypersloth_said(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-n", "10", "--split", "train", "--seed", "3407", "--name", "mine", "--print_samples"]
    assert _build(built, *options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Loading 10 samples from rows.json..."
    begin = lines.index("SAMPLE TEXTS FROM PROCESSED DATASET:")
    assert lines[begin - 1] == lines[begin + 1] == "=" * 80
    sample = lines.index("--- Sample 1 ---")
    assert lines[sample + 1] == "<|im_start|>user"
    assert lines[-3:] == [
        "Dataset saved to: data/built_dataset/mine",
        "Registry updated: data/data_config.json",
        'Dataset "mine" has been successfully built and saved!',
    ]
    assert json.loads(Path("data/data_config.json").read_text())[0]["num_samples"] == 10


def test_show_and_list(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _build(built, "--name", "mine") == 0
    capsys.readouterr()
    assert main(["data", "show", "mine", "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert "--- Sample 2 (rows.json:2, " in shown
    assert "[b]yes 1[/b]<|im_end|>" in shown  # text that looks like console markup is text
    assert "samples 20 " in shown
    assert "duplicates: 0" in shown
    assert main(["data", "list"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["name", "samples"]
    assert row.split()[:3] == ["mine", "20", "response_only"]


def test_options_reach_the_configuration(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--column", "instruction=output", "--column", "output=instruction", "--loss-type", "all", "--root", "other"]
    assert _build(built, "--name", "x", "--max-tokens", "0", "--num-procs", "1", *more) == 0
    meta = json.loads(Path("other/built_dataset/x/manifest.json").read_text())["meta"]
    assert (meta["loss_type"], meta["max_tokens"], meta["template"]) == ("all", None, "chatml")
    assert "Dataset saved to: other/built_dataset/x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--name", "../x"], 2, "name: String should match pattern"),
        (
            ["--name", "x", "--too-long", "shrink"],
            2,
            "too_long: Input should be 'error', 'drop', 'truncate' or 'split'",
        ),
        (["--name", "x", "--weight", "1", "--weight", "2"], 2, "2 --weight for 1 sources"),
        (["--name", "x", "--column", "output"], 2, "--column 'output' is not OURS=YOURS"),
        (["--name", "x", "--template", "chatlm"], 3, "'chatlm' is neither one of chatml"),
    ],
)
def test_mistakes_are_named(
    options: list[str], code: int, message: str, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _build(built, *options) == code
    assert message in capsys.readouterr().err


def test_show_of_an_unknown_name(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "nothing"]) == 3
    assert "no data set 'nothing'" in capsys.readouterr().err
