import signal
import subprocess
import sys

import pytest

from flatout.cli.main import main, overrides_first
from flatout.cli.verbs import all_verbs


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("plan r.yaml --ranks 2 lora.rank=8", "r.yaml lora.rank=8 --ranks 2"),
        ("train r.yaml a.b=1 seed=2", "r.yaml a.b=1 seed=2"),
        ("plan", ""),
        ("train model=m --restart", "- model=m --restart"),
        ("train --profile 3 model=m", "- model=m --profile 3"),
        ("convert x a.b=1", "x a.b=1"),
    ],
)
def test_overrides_may_stand_anywhere(typed, expected):
    verb, *words = typed.split()
    assert overrides_first(all_verbs()[verb], words) == expected.split()


def test_errors_are_one_line_with_their_exit_code(capsys):
    assert main(["train", "no-such-file.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no-such-file.yaml: no such file")
    assert "Traceback" not in error


def test_what_a_terminal_cannot_show_is_escaped(capsys):
    assert main(["train", "\x1b[31mred\x9b\u202e.yaml"]) == 2
    assert r"\x1b[31mred\x9b\u202e.yaml" in capsys.readouterr().err


def test_no_line_of_an_error_is_endless(capsys):
    assert main(["chat", "run", "--device", "cpu", "--device-map", "x" * 5000]) == 2
    assert len(capsys.readouterr().err) < 1000


def test_a_device_map_for_training_names_the_strategy(capsys):
    assert main(["train", "run.yaml", "--device-map", "auto"]) == 2
    assert "strategy=fsdp" in capsys.readouterr().err


def test_no_words_are_help(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name:<9} {verb.help}\n" in said for name, verb in all_verbs().items())
    assert max(map(len, said.splitlines())) <= 100
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == said


def test_every_verb_has_help_with_an_example(capsys):
    for name, verb in all_verbs().items():
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        said = capsys.readouterr().out
        assert f"usage: flatout {name}" in said
        assert said.endswith(f"\nexample: flatout {name} {verb.example}".rstrip() + "\n")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("train", "train: give config: YAML or .py file"),
        ("push run", "push: give REPO: repository, such as org/my-model"),
        ("data", "data: give ACTION: build, show, template or list"),
        ("data build rows.jsonl", "data build: give --tokenizer and --name\n  example: flatout data build"),
        ("plan run.yaml --ranks", "plan: --ranks needs a value: plan for N GPUs"),
    ],
)
def test_what_is_missing_is_named_with_its_help(typed, told, tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(typed.split()) == 2
    assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "build", "--help"])
    assert "--tokenizer TOKENIZER --name NAME\n" in capsys.readouterr().out


# Python deletes the objects of modules after it has restored the signals' default actions
EXITING = """
import os, signal, sys, types
from flatout import errors
from flatout.cli.main import main

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(sys.argv.pop())):
        kill(pid, number)

def run(args, error=getattr(errors, sys.argv.pop())):
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    raise error("its end")

sys.modules["flatout.cli.train"] = types.SimpleNamespace(add_arguments=lambda parser: None, run=run)
last = Last()
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("error", "number", "code"),
    [
        ("PreemptedError", signal.SIGTERM, 75),
        ("PreemptedError", signal.SIGHUP, 75),
        ("PreemptedError", signal.SIGUSR1, 75),
        ("ResourceError", signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_a_signal_while_python_exits_does_not_hide_that_the_run_is_saved(error, number, code):
    """A launcher signals a rank that is exiting because another has exited."""
    words = [sys.executable, "-c", EXITING, "train", error, str(int(number))]
    assert subprocess.run(words, capture_output=True, check=False).returncode == code
