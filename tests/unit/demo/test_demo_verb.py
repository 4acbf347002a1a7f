import json
import subprocess
from functools import partial
from pathlib import Path

import pytest

from flatout import load
from flatout.cli.main import main
from flatout.demo import rounds, settings, write
from flatout.demo.show import loss_halved
from flatout.trainer.run import Result
from flatout.trainer.state import Progress


@pytest.fixture
def few_steps(monkeypatch):
    """The demo as it is, on fewer conversations and for three steps."""
    whole = settings.demo_config

    def short(folder: Path, seed: int) -> settings.Config:
        config = whole(folder, seed)
        return config.model_copy(update={"batch": config.batch.model_copy(update={"max_steps": 3})})

    monkeypatch.setattr(settings, "demo_config", short)
    monkeypatch.setattr(write, "write_demo", partial(write.write_demo, num_train=120, num_held_out=20))


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.usefixtures("few_steps")
def test_an_untrained_model_fails_the_demo_and_says_so(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 1
    out = capsys.readouterr().out
    assert "(WRONG)" in out
    assert "did not halve" in out
    for row in ("answered correctly", "tokens/s", "padding avoided", "eval       7", "flatout chat"):
        assert row in out
    assert (tmp_path / "demo/run/final/model.safetensors").is_file()
    assert (tmp_path / "demo/run/metrics.jsonl").is_file()


@pytest.mark.usefixtures("few_steps")
def test_make_clean_removes_what_the_demo_writes_where_it_is_not_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 1
    (folder,) = tmp_path.iterdir()
    assert (folder / "run" / "final").is_dir()
    words = ["make", "-n", "-f", str(Path(__file__).parents[3] / "Makefile"), "clean"]
    removed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert folder.name in removed
    assert not {"runs", "data"} & {*removed}


@pytest.mark.usefixtures("few_steps")
def test_another_seed_in_the_same_folder_is_refused(tmp_path, capsys):
    write.write_demo(tmp_path, 42)
    assert main(["demo", "--out", str(tmp_path), "--seed", "43"]) == 2
    assert "another seed" in capsys.readouterr().err


@pytest.mark.usefixtures("few_steps")
def test_the_demo_of_rounds_says_how_much_was_learned_and_what_to_look_at(tmp_path, monkeypatch, capsys):
    first, whole = rounds.first_config, rounds.rounds_config

    def short_first(folder: Path, seed: int) -> settings.Config:
        config = first(folder, seed)
        return config.model_copy(update={"batch": config.batch.model_copy(update={"max_steps": 3})})

    def two_rounds(folder: Path, seed: int, model: Path) -> settings.Config:
        config = whole(folder, seed, model)
        few = config.rollout.model_copy(update={"rounds": 2, "prompts": 2, "group": 2, "max_new_tokens": 4})
        return config.model_copy(update={"rollout": few})

    monkeypatch.setattr(rounds, "first_config", short_first)
    monkeypatch.setattr(rounds, "rounds_config", two_rounds)
    monkeypatch.setattr(rounds, "NUM_PROMPTS", 40)
    folder = tmp_path / "demo"
    assert main(["demo", "--rl", "--out", str(folder)]) == 1
    out = capsys.readouterr().out
    for said in ("before the rounds   0.0%", "after the rounds    0.0%", "+0.0 points  (expected +15)"):
        assert said in out
    commands = out.partition("Look further:")[2].splitlines()
    trained = {turn["content"] for row in rows(folder / "train.jsonl") for turn in row["messages"]}
    assert not trained & {row["prompt"] for row in rows(folder / "prompts.jsonl")}
    assert [record.step for record in load(folder / "rounds").log.held_out] == [0, 2]
    assert [line.split()[1] for line in commands if line] == ["rollouts", "rollouts", "chat"]
    assert main(["rollouts", str(folder / "rounds")]) == 0


@pytest.mark.parametrize(
    ("before", "after", "halved"), [(4.0, 2.0, True), (4.0, 2.01, False), (4.0, None, False), (None, None, False)]
)
def test_halved(before, after, halved):
    progress = Progress(first_eval_loss=before, last_eval_loss=after)
    assert loss_halved(Result(Path("run"), Path("run/final"), progress)) is halved


def test_the_demo_evaluates_on_conversations_it_does_not_train_on(tmp_path):
    config = settings.demo_config(tmp_path, 1)
    held_out = settings.held_out_data(config, tmp_path)
    assert held_out.name == config.eval.data != config.data.name
    assert held_out.sources[0].path != config.data.sources[0].path
    assert held_out.root == config.data.root


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path, capsys):
    (tmp_path / "taken").write_text("mine")
    assert main(["demo", "--out", str(tmp_path / "taken")]) == 6
    assert f"cannot create the folder {tmp_path / 'taken'}" in capsys.readouterr().err
