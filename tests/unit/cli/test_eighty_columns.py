"""What verbs print fits a terminal of 80 columns, with names and paths as long as people write them."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys

import pytest
import yaml
from synthetic_run import write_synthetic_run

from flatout.cli.main import main
from flatout.cli.verbs import all_verbs

LONG = "a-name-as-long-as-people-write-them-with-rank-16-and-lr-3e-3"
FOLDER = "a-folder-with-a-rather-long-name/and-a-second-one-below-it-that-is-long-too"
RUN = f"runs/{LONG}"
# of each verb; those that serve, ask the network or take half a minute show their help only
COMMANDS = {
    "data": [
        ["build", "conversations-of-the-support-team-2026-v3.jsonl", "--tokenizer", "model", "--name", LONG],
        ["list"], ["show", LONG, "-n", "1"], ["show", LONG, "--html"],
    ],
    "plan": [["run.yaml"], ["run.yaml", "--device", "all"], ["run.yaml", "--step", "0"], ["no-such.yaml"]],
    "doctor": [["run.yaml"]],
    "train": [["run.yaml"], ["run.yaml"], ["run.yaml", "lora.rank=no-number-but-a-rather-long-text"]],
    "runs": [[]],
    "watch": [[RUN]],
    "replay": [[RUN, "--step", "2"]],
    "launch": [["run.yaml", "--slurm", "--nodes", "2", "--out", "job-script.sh"]],
    "report": [[RUN], [RUN, "runs/other", "--out", f"{LONG}.html"]],
    "chat": [[RUN, "--prompt", "Hello, who are you and where do you live?", "--max-new-tokens", "4"]],
    "eval": [[RUN, "--tasks"]],
    "merge": [[RUN, "--out", f"merged-{LONG}"], [RUN, "--out", f"merged-{LONG}"]],
    "export": [[RUN, "--to", "gguf", "--out", f"exported-{LONG}"]],
    "init": [[f"{LONG}.yaml", "--data", LONG, "--model", "model"]] * 2,
}  # fmt: skip
ONLY_HELP = {"convert", "demo", "studio", "verify", "rollouts", "track", "push"}
PROGRAMS = re.compile(r"\b(flatout|llama-cli|ollama|vllm|pip|sbatch) ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def here(tiny, tmp_path, monkeypatch):
    """A folder with a long path, a model, rows, and settings of a run with a long name; and a terminal."""
    folder = tmp_path / FOLDER
    shutil.copytree(tiny.model_dir, folder / "model")
    shutil.copy(tiny.chats, folder / "conversations-of-the-support-team-2026-v3.jsonl")
    settings = {
        "name": LONG, "model": {"name": "model", "precision": "fp32"}, "data": {"name": LONG}, "device": "cpu",
        "batch": {"max_steps": 4, "samples_per_step": 4}, "eval": {"fraction": 0.1, "prompts": []},
        "checkpoint": {"every_steps": 2},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    write_synthetic_run(folder / "runs" / "other", num_steps=20)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")


def printed(monkeypatch, words):
    """Return the lines of a command at a terminal."""
    screen = Terminal()
    with monkeypatch.context() as at_terminal:
        at_terminal.setattr(sys, "stdout", screen)
        at_terminal.setattr(sys, "stderr", screen)
        with contextlib.suppress(SystemExit):  # of --help
            main(words)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).splitlines()


def is_too_wide(line):
    """A command stays whole, to be copied, and so does a word; beside a long one there is a label at most."""
    longest = max(map(len, line.split()), default=0)
    return len(line) > 80 and not PROGRAMS.search(line) and len(line) - longest > 20


def test_every_verb_fits_eighty_columns(here, monkeypatch):
    assert COMMANDS.keys() | ONLY_HELP == all_verbs().keys()
    found = {}
    for verb in all_verbs():
        lines = printed(monkeypatch, [verb, "--help"])
        assert len(lines) > 5, verb
        found[verb] = list(filter(is_too_wide, lines))
    found["help"] = list(filter(is_too_wide, printed(monkeypatch, ["--help"])))
    for verb, commands in COMMANDS.items():
        for words in commands:
            lines = printed(monkeypatch, [verb, *words])
            assert lines, (verb, words)
            found[verb] += [line for line in lines if is_too_wide(line)]
    assert {verb: lines for verb, lines in found.items() if lines} == {}


def test_programs_get_whole_lines(here, capsys):
    """A pipe has no width: a name is not shortened, and a sentence is one line."""
    name = "no-such-run-" + LONG
    assert main(["report", name]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert len(error) > 80
    assert main(["runs"]) == 0
    assert "other" in capsys.readouterr().out
