"""No verb and no call changes a file that flatout did not write: every output option, with the path that it takes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import flatout
from flatout.cli.main import main
from flatout.config.read import dump_config, load_config
from flatout.errors import FlatoutError
from tests.conftest import read_metrics
from tests.usual import usual


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """A folder with settings, questions, another trainer's file and a finished run."""
    here = tmp_path_factory.mktemp("foreign")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        config = tiny.config(Path("runs/done"), batch={"max_steps": 1}).model_dump(mode="json", exclude_unset=True)
        config["data"]["root"] = "data"
        Path("run.yml").write_text(yaml.safe_dump(config | {"run_dir": None, "name": "new"}))
        Path("questions.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
        Path("theirs.yaml").write_text("model_name_or_path: m\ndataset_name: chats.jsonl\nlearning_rate: 1.0e-4\n")
        flatout.train("run.yml", run_dir="runs/done")
    return here


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass(frozen=True)
class Output:
    """A command whose output `{out}` is. `default` is where it writes without the option; `again` its exit code over
    its own earlier output.
    """

    command: str
    again: int
    default: str = ""


FILES = {
    "report": Output("report runs/done --out {out}", 0, "runs/done/report.html"),
    "report md": Output("report runs/done --format md --out {out}", 0),
    "report json": Output("report runs/done --format json --out {out}", 0),
    "data show": Output("data show chats --html -n 1 --out {out}", 0, "chats.html"),
    "eval": Output(
        "eval runs/done --answers questions.jsonl --max-new-tokens 1 --device cpu --out {out}",
        0,
        "runs/done/eval/questions.json",
    ),
    "init": Output("init {out} --data chats --model m", 2, "run.yaml"),
    "init schema": Output("init --schema {out}", 2),
    "convert": Output("convert theirs.yaml --to {out}", 2),
    "slurm": Output("launch run.yml --slurm --out {out}", 2),
    "kubernetes": Output("launch run.yml --kubernetes --out {out}", 2),
}
FOLDERS = {
    "merge": Output("merge runs/done --out {out}", 6),
    "vllm": Output("export runs/done --to vllm --out {out}", 6),
    "adapter": Output("export runs/done --to vllm --adapter --out {out}", 6),
    "mlx": Output("export runs/done --to mlx --out {out}", 6),
    "gguf": Output("export runs/done --to gguf --out {out}", 6),
    "ollama": Output("export runs/done --to ollama --out {out}", 6),
}


def state(place: Path) -> dict[str, Any]:
    """What a person would see change: contents, times of files and targets of links."""
    found = {}
    for path in sorted({place, *(place.rglob("*") if place.is_dir() and not place.is_symlink() else ())}):
        if path.is_symlink():
            found[str(path)] = str(path.readlink())
        elif path.is_file():
            found[str(path)] = (path.stat().st_mtime_ns, path.read_bytes())
    return found


def a_file(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("<!doctype html><title>mine</title>")


def a_link(place: Path) -> None:
    a_file(place.with_name("target"))
    place.symlink_to("target")


def a_link_to_nothing(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to("nowhere")


def a_link_to_a_folder(place: Path) -> None:
    (place.parent / "elsewhere").mkdir(parents=True)
    place.symlink_to("elsewhere")


def a_folder(place: Path) -> None:
    a_file(place / "config.json")


KINDS = [a_file, a_link, a_link_to_nothing, a_link_to_a_folder, a_folder]


@pytest.mark.parametrize("name", usual([*FILES, *FOLDERS], ["report", "data show", "init", "merge"]))
def test_what_stands_at_an_output_stays_but_an_own_earlier_one(here, name, capsys):
    output = (FILES | FOLDERS)[name]
    command = output.command.format(out="new.yaml").split()
    assert [main(command), (here / "new.yaml").exists(), main(command)] == [0, True, output.again]
    capsys.readouterr()
    for kind in KINDS:
        place = f"{kind.__name__}/out.yaml"
        require_kept(here / place, kind, output.command.format(out=place), capsys)
    if output.default:
        command = output.command.replace(" --out {out}", "").replace(" {out}", "")
        for kind in (a_file, a_link, a_link_to_nothing):
            require_kept(here / output.default, kind, command, capsys)
            (here / output.default).unlink()


def require_kept(place: Path, make: Callable[[Path], None], command: str, capsys: pytest.CaptureFixture[str]) -> None:
    make(place)
    before = state(place.parent)
    assert main(command.split()) in (2, 6), command
    assert capsys.readouterr().err.count("error: ") == 1
    assert state(place.parent) == before


def test_a_page_in_python_replaces_pages_alone(here):
    page = flatout.load("done").plot()
    a_file(here / "mine.html")
    before = state(here / "mine.html")
    with pytest.raises(FlatoutError, match=r"'mine\.html' exists and was not written by this command"):
        page.save("mine.html")
    assert state(here / "mine.html") == before
    assert page.save("page.html") == page.save("page.html") == Path("page.html")


# of other programs, in a folder that is given as a run's
OF_OTHERS = {
    "config.yaml": "# mine\nmodel: m  # the small one\n",
    "start.json": '{"step": 0}',
    "metrics.jsonl": '{"loss": 1.0}\n',
    "train.log": "epoch 1\n",
    "notes.json": "{}",
    "run.json": '{"run_id": "0123456789abcdef", "wandb": 1}',
    ".lock": "pid 1",
    "logs/latest": "step 1\n",
    "checkpoints/step-9/model.pt": "weights",
    "final/weights": "weights",
    "verify.json": "{}",
}


RUNS: dict[str, Callable[[str], int]] = {
    "train": lambda run: main(["train", "run.yml", f"run_dir={run}"]),
    "train --restart": lambda run: main(["train", "run.yml", f"run_dir={run}", "--restart"]),
    "train on ranks": lambda run: main(["train", "run.yml", f"run_dir={run}", "gpus=2"]),
    "verify": lambda run: main(["verify", "run.yml", f"run_dir={run}"]),
    "doctor": lambda run: main(["doctor", "run.yml", f"run_dir={run}"]),
    "note": lambda run: main(["runs", "--note", run, "mine"]),
    "track": lambda run: main(["track", run, "--to", "tensorboard"]),
}
CALLS: dict[str, Callable[[str], object]] = {
    "train": lambda run: flatout.train("run.yml", run_dir=run),
    "restart": lambda run: flatout.train("run.yml", run_dir=run, restart=True),
    "ranks": lambda run: flatout.train("run.yml", run_dir=run, gpus=2),
    "verify": lambda run: flatout.verify("run.yml", run_dir=run),
    "load": flatout.load,
}


@pytest.mark.parametrize("name", usual(OF_OTHERS, ["config.yaml", "run.json"]))
def test_another_programs_folder_stays_as_it_is(here, name, capsys):
    file = here / "proj" / name
    file.parent.mkdir(parents=True)
    file.write_text(OF_OTHERS[name])
    before = state(here / "proj")
    for verb, run in RUNS.items():
        assert run("proj") in (2, 3, 6), verb
        out, err = capsys.readouterr()
        assert "proj" in out + err, verb
        assert state(here / "proj") == before, verb
    for call, do in CALLS.items():
        with pytest.raises(FlatoutError, match="proj"):
            do("proj")
        assert state(here / "proj") == before, call
    assert main(["runs", "."]) == 0
    assert "proj" not in capsys.readouterr().out


def test_a_persons_own_settings_in_the_folder_of_their_name_are_refused_and_the_advice_works(here, capsys):
    (here / "runs" / "a").mkdir()
    text = "# mine\n" + (here / "run.yml").read_text().replace("name: new", "name: a")
    (here / "runs" / "a" / "config.yaml").write_text(text)
    before = state(here / "runs" / "a")
    assert main(["train", "runs/a/config.yaml"]) == 2
    said = capsys.readouterr().err
    assert "runs/a is not the folder of a run, and holds config.yaml, which a run would replace" in said
    assert state(here / "runs" / "a") == before
    assert said.splitlines()[-1] == "  try run_dir=runs/a-2"
    assert main(["train", "runs/a/config.yaml", "run_dir=runs/a-2"]) == 0
    assert state(here / "runs" / "a") == before
    assert (here / "runs" / "a-2" / "final").is_dir()


def test_files_that_stand_beside_a_runs_stay_and_a_restart_names_them(here, capsys):
    for name in ("notes.md", "data/rows.csv"):
        a_file(here / "runs" / "new" / name)
    before = state(here / "runs" / "new")
    for words in ([], [], ["--restart"]):
        assert main(["train", "run.yml", *words]) == 0
        assert {path: state(here / "runs" / "new")[path] for path in before} == before
    assert "data, notes.md, which no run wrote, stays in runs/new" in " ".join(capsys.readouterr().out.split())
    assert read_metrics(here / "runs" / "new.old-1")


def test_comments_in_a_runs_settings_stay(here):
    file = here / "runs" / "done" / "config.yaml"
    mine = "# what I tried\n" + file.read_text()
    file.write_text(mine)
    shutil.rmtree(here / "runs" / "done" / "final")  # so that there is something to do
    assert main(["train", str(file)]) == 0
    assert file.read_text() == mine
    shutil.rmtree(here / "runs" / "done" / "final")
    assert main(["train", str(file), "log_every_steps=2"]) == 0
    assert load_config(file).log_every_steps == 2
    assert file.with_name("config.yaml.old-1").read_text() == mine
    assert file.read_text() == dump_config(load_config(file))


def test_a_data_set_replaces_its_own_folder_alone(here, tiny, capsys):
    build = ["data", "build", str(tiny.chats), "--tokenizer", str(tiny.model_dir), "--max-tokens", "400", "--replace"]
    a_file(here / "data" / "built_dataset" / "mine" / "rows.csv")
    a_file(here / "data" / "built_dataset" / "chats" / "notes.md")
    before = state(here / "data" / "built_dataset" / "mine")
    kept = state(here / "data" / "built_dataset" / "chats" / "notes.md")
    assert main([*build, "--name", "mine"]) == 2
    assert "data/built_dataset/mine is not a built data set" in capsys.readouterr().err
    for change in (["data.name=mine"], ["data.name=mine", "run_dir=runs/x"]):
        assert main(["train", "run.yml", *change]) == 2
    with pytest.raises(FlatoutError, match="is not a built data set"):
        flatout.build_data(tiny.chats, tokenizer=tiny.model_dir, name="mine", replace=True)
    assert state(here / "data" / "built_dataset" / "mine") == before
    assert main([*build, "--name", "chats"]) == 0
    assert state(here / "data" / "built_dataset" / "chats" / "notes.md") == kept
    (here / "other").mkdir()
    (here / "other" / "data_config.json").write_text('[{"path": "mine"}]')
    before = state(here / "other")
    assert main([*build, "--root", "other", "--name", "chats"]) == 3
    assert state(here / "other") == before


OF_A_DEMO = ["train.jsonl", "model/config.json", "model/tokenizer.json", "run/config.yaml"]


@pytest.mark.parametrize("name", usual(OF_A_DEMO, [OF_A_DEMO[1], OF_A_DEMO[3]]))
def test_a_demo_leaves_a_persons_files_as_they_are(here, name):
    a_file(here / "proj" / name)
    before = state(here / "proj" / name)
    assert main(["demo", "--out", "proj"]) == 2
    assert state(here / "proj" / name) == before
    if name != "run/config.yaml":
        (here / "proj").rename(here / "demo")
        main(["init", "new.yaml"])
        assert (here / "demo" / name).read_bytes() == before[str(here / "proj" / name)][1]
