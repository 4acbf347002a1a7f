"""An error is written once, and spelled for who reads it."""

import ast

import pytest

from flatout.config.read import make_config
from flatout.config.spelling import STUDIO, Caller, spelled
from flatout.errors import next_steps

COMMAND = Caller("command", ["train", "run.yaml", "lr=1e-4", "seed=1"])
PYTHON = Caller("python", ["train"])
PROSE = "it does not fit; set recompute: full or base.storage: nf4, or use data.max_tokens: 512"


@pytest.mark.parametrize(
    ("caller", "text"),
    [
        (
            COMMAND,
            "it does not fit; set recompute=full or base.storage=nf4, or use data.max_tokens=512\n"
            "  flatout train run.yaml lr=1e-4 seed=1 recompute=full",
        ),
        (
            PYTHON,
            'it does not fit; set recompute="full" or storage="nf4", or use max_tokens=512\n'
            '  flatout.train(..., recompute="full")',
        ),
        (STUDIO, PROSE),
    ],
)
def test_settings_in_a_sentence(caller: Caller, text: str) -> None:
    assert spelled(PROSE, caller) == text


def test_facts_about_settings_stay_as_they_are() -> None:
    facts = "settings differ:\n  - optim.lr: 0.1 in the checkpoint, 0.2 now\n  - seed: 1 was given"
    assert all(spelled(facts, caller) == facts for caller in (COMMAND, PYTHON, STUDIO))


@pytest.mark.parametrize(
    ("words", "on_command", "in_python", "in_studio"),
    [
        ("name=run-2", "flatout train run.yaml lr=1e-4 seed=1 name=run-2", 'flatout.train(..., name="run-2")',
         "Name of the run: run-2"),
        ("seed=2", "flatout train run.yaml lr=1e-4 seed=2", "flatout.train(..., seed=2)", "seed: 2"),
        ("optim.lr=1e-4 instead of lr", "flatout train run.yaml optim.lr=1e-4 seed=1", "flatout.train(..., lr=1e-4)",
         "optim.lr: 1e-4"),
        ("--restart", "flatout train run.yaml lr=1e-4 seed=1 --restart", "flatout.train(..., restart=True)", None),
        ("gpus=[0,1]", "flatout train run.yaml lr=1e-4 seed=1 'gpus=[0,1]'", "flatout.train(..., gpus=[0, 1])",
         "gpus: [0,1]"),
        ("other.yaml instead of run.yaml", "flatout train other.yaml lr=1e-4 seed=1",
         '"other.yaml" instead of "run.yaml"', None),
        ("2e-4 instead of 1e-4", "flatout train run.yaml lr=2e-4 seed=1", '"2e-4" instead of "1e-4"', None),
        ("b.jsonl instead of a.jsonl", None, '"b.jsonl" instead of "a.jsonl"', None),
    ],
)  # fmt: skip
def test_next_steps(words: str, on_command: str | None, in_python: str, in_studio: str | None) -> None:
    text = "refused" + next_steps((words, "why"))
    for caller, step in ((COMMAND, on_command), (PYTHON, in_python), (STUDIO, in_studio)):
        assert spelled(text, caller) == "refused" + (f"\n  {step}  # why" if step else "")


@pytest.mark.parametrize(
    ("given", "gpus"),
    [(2, [0, 1]), ("2", [0, 1]), ("0,1", [0, 1]), ("3,", [3]), ("1, 3", [1, 3]), ([0, 2], [0, 2]), (None, None)],
)
def test_gpus_may_be_a_number_or_a_list(given: object, gpus: list[int] | None) -> None:
    assert make_config({"model": "m", "gpus": given}).gpus == gpus
    if given is not None:
        assert make_config({"model": "m"}, [f"gpus={given}"]).gpus == gpus


@pytest.mark.parametrize(
    "value",
    [
        "a: b: c",
        "[1, 2",
        "{",
        "it's",
        'say "hi"',
        "*x",
        "@home",
        "%",
        "\t",
        "2026-11-26",
        ".inf",
        "nan",
        "- ",
        "",
        "!!x y",
    ],
)
def test_a_value_that_is_no_yaml_is_spelled_as_text(value: str) -> None:
    text = "refused" + next_steps((f"name={value}", ""))
    for caller in (COMMAND, PYTHON, STUDIO):
        assert spelled(text, caller).startswith("refused")
    call = ast.parse(PYTHON.setting("name", value), mode="exec")
    assert isinstance(call.body[0], ast.Assign)
    ast.literal_eval(call.body[0].value)
