"""`flatout eval`: own questions and lm-eval's tasks on a run, its results in files, and wrong input in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from flatout.cli.main import main
from flatout.errors import install
from flatout.models.load.inference import load_trained, resolve_model_paths
from flatout.rollout.chat import Sampling, answer
from flatout.track import console
from flatout.trainer.run import train

QUESTION = "What is my name?"
TASK = """
task: colors
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    train(tiny.config(folder, batch={"max_steps": 8}, optim={"lr": 2e-2}, lora={"rank": 8}))
    return folder


def said_by_chat(finished: Path) -> str:
    model, tokenizer = load_trained(resolve_model_paths(str(finished)), device=torch.device("cpu"))
    greedy = {"max_new_tokens": 6, "sampling": Sampling(temperature=0.0)}
    return answer(model, tokenizer, [{"role": "user", "content": QUESTION}], **greedy)


def test_own_questions_are_scored_by_exact_match(finished, tmp_path, capsys):
    said = said_by_chat(finished)
    assert said
    file = tmp_path / "questions.jsonl"
    turn = {"role": "user", "content": QUESTION}
    rows = [
        {"prompt": QUESTION, "answer": f"  {said}\n"},
        {"messages": [turn], "answer": ["something else", said.swapcase()]},
        {"prompt": QUESTION, "answer": "something else"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["eval", str(finished), "--answers", str(file), "--device", "cpu", "--max-new-tokens", "6"]
    assert main([*command, "--merged"]) == 0
    results = finished / "eval" / "questions.json"
    shown = capsys.readouterr().out
    assert f"written to {results}" in shown
    assert max(map(len, shown.replace(str(results), "").splitlines())) <= 80
    found = json.loads(results.read_text())
    is_caseless = said.swapcase() == said
    assert [row["right"] for row in found["answers"]] == [True, is_caseless, False]
    assert (found["num_prompts"], found["merged"]) == (3, True)
    assert {row["answer"] for row in found["answers"]} == {said}
    assert found["exact_match"] == found["num_right"] / 3

    assert main([*command, "--ignore-case", "--limit", "2", "--out", str(tmp_path / "out" / "all.json")]) == 0
    found = json.loads((tmp_path / "out" / "all.json").read_text())
    assert (found["num_right"], found["num_prompts"], found["ignore_case"]) == (2, 2, True)
    assert "exact match: 2 of 2 right (100.0%)" in capsys.readouterr().out


def test_tasks_of_lm_eval_are_scored(finished, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    from datasets import config as datasets_config

    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "colors.jsonl"
    rows = [{"question": f"Question {n}: the color is", "choices": [" red", " blue"], "label": n % 2} for n in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "colors.yaml").write_text(TASK.replace("DATA", str(data)))
    command = ["eval", str(finished), "--device", "cpu", "--include-path", str(tmp_path / "tasks"), "--tasks"]
    # every silence is long enough for a line
    monkeypatch.setattr(console, "SILENT_S", 0.0)
    monkeypatch.setattr(console, "SILENT_STEPS_S", 0.0)
    monkeypatch.setattr(console, "TICK_S", 0.001)
    assert main([*command, "colors", "--limit", "4"]) == 0
    shown, told = capsys.readouterr()
    assert re.search(r"^\.{3} {8}scoring tasks.* \d+ s$", told, re.MULTILINE)
    assert "it/s]" not in told.rpartition("Loading weights")[2].partition("\n")[2]
    assert max(map(len, told.splitlines()[-3:])) <= 80
    found = json.loads((finished / "eval" / "colors.json").read_text())
    (row,) = found["tasks"]
    assert (row["task"], row["metric"], row["num_samples"]) == ("colors", "acc", 4)
    # every question has the same two choices, so the model prefers one of them or the other
    assert row["value"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert f"{row['value']:.4f}" in shown
    assert max(map(len, shown.splitlines()[:2])) <= 80

    # a file of questions with the name of the task
    own = tmp_path / "own" / "colors.jsonl"
    own.parent.mkdir()
    own.write_text(json.dumps({"prompt": QUESTION, "answer": "a"}) + "\n")
    assert main([*command, "colors", "--limit", "4", "--answers", str(own), "--max-new-tokens", "2"]) == 0
    assert "tasks" in json.loads((finished / "eval" / "colors.json").read_text())
    assert "answers" in json.loads((finished / "eval" / "answers-colors.json").read_text())
    capsys.readouterr()

    assert main([*command, "collors"]) == 2
    assert "lm-eval has no task 'collors'; did you mean colors?" in capsys.readouterr().err
    (tmp_path / "tasks" / "colors.yaml").write_text(TASK.replace("DATA", str(tmp_path / "gone.jsonl")))
    assert main([*command, "colors"]) == 2
    assert "error: --tasks: lm-eval cannot run colors: " in capsys.readouterr().err


WRONG: dict[str, tuple[list[str], int, str]] = {
    "nothing": ([], 2, "nothing to score: give --tasks"),
    "limit": (["--tasks", "a", "--limit", "-1"], 2, "--limit is -1"),
    "missing file": (["--answers", "gone.jsonl"], 3, "gone.jsonl: No such file or directory"),
    "empty set": (["--answers", "empty.jsonl"], 3, "empty.jsonl: no prompts"),
    "no answer": (["--answers", "open.jsonl"], 3, "open.jsonl: prompt 1 has no answer to compare with"),
    "bad row": (["--answers", "bad.jsonl"], 3, "bad.jsonl:1: answer must be a text or a list of texts"),
    "no folder": (["--tasks", "a", "--include-path", "gone"], 2, "--include-path: gone is not a folder"),
    "no effect": (["--answers", "open.jsonl", "--chat"], 2, "--chat and --batch-size have no effect without --tasks"),
    "no batches": (["--answers", "open.jsonl", "--batch-size", "4"], 2, "--batch-size have no effect without --tasks"),
    "no length": (["--tasks", "a", "--max-new-tokens", "4"], 2, "--max-new-tokens have no effect without --answers"),
    "two outputs": (["--answers", "a.jsonl", "--tasks", "a", "--out", "b"], 2, "--out is one file"),
    "not merged": (["--answers", "good.jsonl", "--merged"], 2, "has no adapter to merge"),
    "no template": (["--answers", "good.jsonl"], 2, "--answers: the tokenizer has no chat template"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_sentence(case, tiny, tmp_path, capsys, monkeypatch):
    options, code, text = WRONG[case]
    if "--include-path" in options:
        pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("")
    Path("open.jsonl").write_text('{"prompt": "a"}\n')
    Path("bad.jsonl").write_text('{"prompt": "a", "answer": 3}\n')
    Path("good.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    # a plain model, whose tokenizer has no chat template
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny.model_dir.iterdir():
        if file.name != "chat_template.jinja":
            (model / file.name).symlink_to(file)
    assert main(["eval", str(model), "--device", "cpu", *options]) == code
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert text in errors[0]
    assert not (model / "eval").exists()


def test_without_lm_eval_the_error_says_what_to_install(tiny, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.tasks", None)
    assert main(["eval", str(tiny.model_dir), "--tasks", "arc_easy", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "--tasks needs the package lm_eval" in error
    assert install("eval") in error


def test_a_question_beyond_the_models_positions_is_named(finished, tmp_path, capsys):
    file = tmp_path / "questions.jsonl"
    rows = [{"prompt": QUESTION, "answer": "a"}, {"prompt": "x y" * 4000, "answer": "a"}]
    command = ["eval", str(finished), "--answers", str(file), "--device", "cpu", "--max-new-tokens", "2"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{file}:2: the prompt has " in error
    assert "but the model has 2,048 positions" in error
    file.write_text(json.dumps(rows[0]) + "\n")
    assert main(command) == 0
