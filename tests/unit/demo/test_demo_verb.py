import subprocess
from functools import partial
from pathlib import Path

import pytest

from flatout.cli.main import main
from flatout.demo import settings, write
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


@pytest.mark.usefixtures("few_steps")
def test_an_untrained_model_fails_the_demo_and_says_so(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 1
    out = capsys.readouterr().out
    assert "(WRONG)" in out
    assert "did not halve" in out
    for row in ("answered correctly", "tokens/s", "padding avoided", "run folder", "flatout chat"):
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


@pytest.mark.parametrize(
    ("before", "after", "halved"), [(4.0, 2.0, True), (4.0, 2.01, False), (4.0, None, False), (None, None, False)]
)
def test_halved(before, after, halved):
    progress = Progress(first_eval_loss=before, last_eval_loss=after)
    assert loss_halved(Result(Path("run"), Path("run/final"), 1, progress)) is halved


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
