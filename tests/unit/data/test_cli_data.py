from __future__ import annotations

import io
import json
import os
import pty
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from flatout.cli.main import main
from tests.usual import every
from tests.warm_process import WarmProcess


@pytest.fixture
def built(tmp_path, small_tokenizer_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"instruction": f"the question {i}", "input": "", "output": f"[b]yes {i}[/b]"} for i in range(20)]
    Path("rows.json").write_text(json.dumps(rows))
    return small_tokenizer_dir


def _build(tokenizer: Path, *more: str) -> int:
    return main(["data", "build", "rows.json", "--tokenizer", str(tokenizer), "--template", "chatml", *more])


def test_build_says_what_hypersloth_said(built, capsys):
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


def test_show_and_list(built, capsys):
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


def test_options_reach_the_configuration(built, capsys):
    more = ["--column", "instruction=output", "--column", "output=instruction", "--loss-type", "all", "--root", "other"]
    assert _build(built, "--name", "x", "--max-tokens", "0", "--num-procs", "1", *more) == 0
    meta = json.loads(Path("other/built_dataset/x/manifest.json").read_text())["meta"]
    settings = meta["settings"]
    assert (settings["loss_type"], settings["max_tokens"], meta["template"]) == ("all", None, "chatml")
    assert "Dataset saved to: other/built_dataset/x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--name", "../x"], 2, "name: use letters, digits"),
        (["--name", "x", "--too-long", "shrink"], 2, "--too-long: expected one of auto, error, drop, truncate, split"),
        (["--name", "x", "--weight", "1", "--weight", "2"], 2, "2 --weight for 1 sources"),
        (["--name", "x", "--column", "output"], 2, "--column 'output': write FLATOUT_NAME=YOUR_COLUMN"),
        (["--name", "x", "--template", "chatlm"], 3, "there is no template 'chatlm'; known: chatml"),
        (["--name", "x", "--template", "none.jinja"], 3, "or a .jinja file"),
    ],
)
def test_mistakes_are_named(options, code, message, built, capsys):
    assert _build(built, *options) == code
    assert message in capsys.readouterr().err


def test_show_of_an_unknown_name(built, capsys):
    assert main(["data", "show", "nothing"]) == 3
    assert "no data set 'nothing'" in capsys.readouterr().err


def test_data_commands_no_terminal_and_needs_no_utf8(built, monkeypatch):
    Path("rows.json").write_text(json.dumps([{"instruction": "q", "output": "\x1b]0;owned\x07 snow ☃"}]))
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="ascii") for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    assert _build(built, "--name", "x", "--print-samples") == 0
    assert main(["data", "show", "x"]) == 0
    assert main(["data", "build", "\x1b[2Jrows.json", "--tokenizer", str(built), "--name", "y"]) == 3
    out, err = (stream.detach().getvalue().decode("ascii") for stream in streams.values())  # type: ignore[attr-defined]
    assert out.count(r"\x1b]0;owned\x07 snow ?") == 2
    assert r"\x1b[2Jrows.json: no data file matches" in err
    assert "\x1b" not in out + err


def test_a_killed_build_leaves_no_process(built):
    rows = "".join(json.dumps({"instruction": "q", "output": "a" * 999}) + "\n" for _ in range(20000))
    Path("many.jsonl").write_text(rows)
    command = ["-m", "flatout", "data", "build", "many.jsonl", "--tokenizer", str(built)]
    build = WarmProcess([*command, "--template", "chatml", "--name", "x", "--num-procs", "2"], os.environ, Path("log"))

    def alive(pid: int) -> bool:
        with suppress(FileNotFoundError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    def wait_until(what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def below(pid: int) -> list[int]:
        children = list[int]()
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                children += map(int, (task / "children").read_text().split())
        return children + [child for one in children for child in below(one)]

    wait_until(lambda: len(below(build.pid)) >= 2)
    workers = below(build.pid)
    build.kill()
    build.wait()
    wait_until(lambda: not any(map(alive, workers)))


def test_another_set_of_that_name_is_replaced_only_when_asked(built, capsys):
    assert _build(built, "--name", "x", "--max_tokens", "64") == 0
    assert _build(built, "--name", "x", "--max-tokens=64") == 0
    capsys.readouterr()
    assert _build(built, "--name", "x", "--max_tokens=32", "--seed", "5") == 2
    told = "max_tokens=64, but 32 is configured; seed=3407, but 5 is configured"
    refused = " ".join(capsys.readouterr().err.split())
    assert f"'x' already exists and differs: {told} try --replace" in refused
    assert _build(built, "--name", "x", "--max_tokens=32", "--seed", "5", "--replace") == 0
    assert f"Rebuilding 'x': {told}" in " ".join(capsys.readouterr().err.split())
    Path("rows.json").write_text(json.dumps([{"instruction": "q", "output": "a"}]))
    assert _build(built, "--name", "x", "--max-tokens", "32", "--seed", "5") == 2
    assert "its rows or the way they are read changed" in capsys.readouterr().err


def test_variables_of_the_template_reach_it(built, capsys):
    qwen = ["--template", "qwen3", "--empty-reasoning", "mask", "--template-arg", "enable_thinkin=false"]
    assert _build(built, "--name", "x", *qwen) == 3
    assert "chat template 'qwen3' does not read 'enable_thinkin'" in capsys.readouterr().err
    assert _build(built, "--name", "x", *qwen[:-2]) == 0
    settings = json.loads(Path("data/built_dataset/x/manifest.json").read_text())["meta"]["settings"]
    assert (settings["empty_reasoning"], settings["template_args"]) == ("mask", {})


HEADS = ["question,answer", "Question,Response", "input,output", "query,response", "Prompt,Reply"]


@pytest.mark.parametrize("head", every(4, HEADS))
def test_near_columns_are_named_in_the_command_and_taken_with_yes(tiny, tmp_path, monkeypatch, capsys, head):
    monkeypatch.chdir(tmp_path)
    Path("qa.csv").write_text(f"{head}\nWhat is it?,A thing.\nWho is it?,A cat.\n")
    build = ["data", "build", "qa.csv", "--tokenizer", str(tiny.model_dir), "--name", "qa"]
    assert main(build) == 3
    yes, columns = (line.partition("  # ")[0].split()[1:] for line in capsys.readouterr().err.splitlines()[-2:])
    assert yes == ["--yes"]
    assert main([*build, *columns]) == 0
    assert "qa.csv: alpaca rows" in capsys.readouterr().err
    assert main([*build, *yes]) == 0
    printed = capsys.readouterr()
    assert f"columns    qa.csv: instruction is {head.split(',')[0]}" in printed.out
    assert "Reusing" in printed.err


def test_columns_that_mean_nothing_are_not_taken(tiny, tmp_path, capsys):
    (tmp_path / "odd.csv").write_text("alpha,beta\n1,2\n")
    build = ["data", "build", str(tmp_path / "odd.csv"), "--tokenizer", str(tiny.model_dir), "--name", "odd", "--yes"]
    assert main([*build, "--root", str(tmp_path / "data")]) == 3
    assert "no known format has these columns" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "code"), [("\n", 0), ("n\n", 3)])
def test_near_columns_are_taken_on_a_yes_at_a_terminal(tiny, tmp_path, monkeypatch, typed, code):
    monkeypatch.chdir(tmp_path)
    Path("qa.csv").write_text("question,answer\nWhat is it?,A thing.\n")
    ours, theirs = pty.openpty()
    os.write(ours, typed.encode())
    with os.fdopen(theirs) as keys, os.fdopen(os.dup(theirs), "w") as screen:
        for name, stream in {"stdin": keys, "stdout": screen, "stderr": screen}.items():
            monkeypatch.setattr(sys, name, stream)
        assert main(["data", "build", "qa.csv", "--tokenizer", str(tiny.model_dir), "--name", "qa"]) == code
    monkeypatch.undo()
    shown = b""
    with suppress(OSError):  # the terminal's other end is closed
        while block := os.read(ours, 4096):
            shown += block
    os.close(ours)
    assert b"Take columns of qa.csv: instruction is question, output is answer? [Y/n]" in shown
