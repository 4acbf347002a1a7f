import pytest

from flatout.cli.main import main, overrides_first


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["plan", "r.yaml", "--ranks", "2", "lora.rank=8"], ["plan", "r.yaml", "lora.rank=8", "--ranks", "2"]),
        (["train", "r.yaml", "a.b=1", "seed=2"], ["train", "r.yaml", "a.b=1", "seed=2"]),
        (["data", "build", "x", "--column", "a=b"], ["data", "build", "x", "--column", "a=b"]),
        (["plan"], ["plan"]),
        ([], []),
    ],
)
def test_overrides_may_stand_anywhere(argv: list[str], expected: list[str]) -> None:
    assert overrides_first(argv) == expected


def test_errors_are_one_line_with_their_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "no-such-file.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no-such-file.yaml: cannot be read")
    assert "Traceback" not in error


def test_what_a_terminal_cannot_show_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "\x1b[31mred\x9b\u202e.yaml"]) == 2
    assert r"\x1b[31mred\x9b\u202e.yaml" in capsys.readouterr().err


def test_no_line_of_an_error_is_endless(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "run", "--device", "cpu", "--device-map", "x" * 5000]) == 2
    assert len(capsys.readouterr().err) < 1000


def test_a_device_map_for_training_names_the_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.yaml", "--device-map", "auto"]) == 2
    assert "strategy=fsdp" in capsys.readouterr().err


def test_an_unknown_verb_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["trian"])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "verb",
    ["bench", "demo", "init", "data", "plan", "verify", "doctor", "launch", "train", "chat", "merge", "export", "push"],
)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert f"flatout {verb}" in capsys.readouterr().out
