"""Two commands on one data set: a reader keeps what it opened; a builder and a reference never mix two data sets."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from itertools import count, cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit_store import write_units

from flatout.cli.main import main
from flatout.data import token_store
from flatout.data.token_store import TokenStore
from flatout.io.durable_io import Disk
from flatout.track.callback import MemoryCallback
from flatout.trainer.run import train
from tests.usual import usual
from tests.warm_process import WarmProcess


@pytest.fixture
def files(tmp_path):
    """Two files of pairs, of different sizes."""
    made = {}
    for name, number in (("few", 12), ("many", 20)):
        rows = [
            {"prompt": f"{name} {k}?", "chosen": f"yes, it is {k}", "rejected": f"no, it is {k + 1} or more"}
            for k in range(number)
        ]
        made[name] = tmp_path / f"{name}.jsonl"
        made[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.fixture
def build(tiny, files, tmp_path):
    def build(name: str, *more: str) -> Any:
        root = ("--root", str(tmp_path / "data"), "--num-procs", "1")
        return main(
            ["data", "build", str(files[name]), "--tokenizer", str(tiny.model_dir), "--name", "d", *root, *more]
        )

    return build


@pytest.fixture
def config_of(tiny, tmp_path):
    def config_of(name: str) -> Any:
        return tiny.config(
            tmp_path / name, objective="dpo", batch={"samples_per_step": 4, "max_steps": 3},
            data={"name": "d", "root": str(tmp_path / "data"), "sources": [], "max_tokens": 2048},
        )  # fmt: skip

    return config_of


@pytest.fixture
def ends():
    """Fail a test that waits for ever, instead of the whole suite."""
    signal.alarm(300)
    yield
    signal.alarm(0)


class At(MemoryCallback):
    """Does something once, when a phase begins or a step ends."""

    def __init__(self, moment: str, act: Callable[[], Any]) -> None:
        super().__init__()
        self._moment, self._act, self.times = moment, act, 0

    def _reached(self, moment: str) -> None:
        if moment == self._moment and not self.times:
            self.times += 1
            assert self._act() == 0

    def on_phase(self, name: str, done: int, total: int) -> None:
        self._reached(name)

    def on_step(self, record: Any) -> None:
        super().on_step(record)
        self._reached("step 1")


MOMENTS = ("looking for the reference", "computing the reference", "step 1")
TIMES = [*product(MOMENTS, ("replaced", "removed"))]


@pytest.mark.parametrize(("moment", "how"), usual(TIMES, [TIMES[1], TIMES[2], TIMES[4]]))
def test_a_run_goes_on_with_the_data_set_that_it_opened(build, config_of, tmp_path, metrics_of, moment, how):
    folder = tmp_path / "data" / "built_dataset" / "d"

    def remove() -> int:
        shutil.rmtree(folder)
        return 0

    assert build("few") == 0
    shutil.copytree(tmp_path / "data", tmp_path / "kept")
    callback = At(moment, remove if how == "removed" else lambda: build("many", "--replace"))
    train(config_of("run"), callbacks=[callback])
    assert callback.times == 1
    said = [text for _, name, text in callback.stages if name == "reference"]
    assert any(f"{folder} was replaced or removed after this run had opened it" in text for text in said) == (
        moment != "step 1"
    )
    if how == "replaced":  # and the new data set is whole, and has nothing of the old one's
        store = TokenStore.open(folder)
        assert sum(len(store.sample(k).token_ids) for k in range(store.num_samples)) == store.offsets[-1]
        assert not [name for name in store.columns if name.startswith("reference_")]
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "kept").rename(tmp_path / "data")
    train(config_of("plain"))
    losses, expected = ([one["loss"] for one in metrics_of(tmp_path / name)] for name in ("run", "plain"))
    assert losses == expected
    assert len(losses) == 3


def test_two_runs_that_compute_one_reference_at_once(build, config_of, tmp_path, metrics_of):
    """The second process begins and ends while the first one computes."""
    from flatout.config.read import dump_config

    assert build("few") == 0
    (tmp_path / "other.yaml").write_text(dump_config(config_of("other")))
    command = ["-m", "flatout", "train", str(tmp_path / "other.yaml")]
    callback = At("computing the reference", lambda: WarmProcess(command, os.environ, tmp_path / "log").wait())
    train(config_of("one"), callbacks=[callback])
    assert callback.times == 1
    assert [one["loss"] for one in metrics_of(tmp_path / "one")] == [
        one["loss"] for one in metrics_of(tmp_path / "other")
    ]
    third = MemoryCallback()
    train(config_of("third"), callbacks=[third])
    assert any("known from an earlier run" in text for _, name, text in third.stages if name == "reference")


def test_a_reader_between_the_two_renames_of_a_builder_gets_the_new_data_set(build, tmp_path, monkeypatch, capfd):
    assert build("few") == 0
    folder, moved, looked = tmp_path / "data" / "built_dataset" / "d", threading.Event(), threading.Event()
    rename, sleep = Disk.rename, token_store.time.sleep

    def renamed(source: Path, target: Path) -> None:
        rename(source, target)
        if source == folder:
            moved.set()
            assert looked.wait(60)

    def slept(seconds: float) -> None:
        looked.set()
        sleep(seconds)

    monkeypatch.setattr(Disk, "rename", staticmethod(renamed))
    builder = threading.Thread(target=build, args=("many", "--replace"))
    builder.start()
    assert moved.wait(60)
    monkeypatch.setattr(token_store.time, "sleep", slept)
    assert main(["data", "show", "d", "--root", str(tmp_path / "data")]) == 0
    builder.join()
    assert "many" in capfd.readouterr().out
    # after a crash between the two, nobody finishes it: that is said
    monkeypatch.undo()
    monkeypatch.setattr(token_store, "time", SimpleNamespace(monotonic=count(0, 10).__next__, sleep=lambda _: None))
    folder.rename(token_store.replaced_dir(folder))
    assert main(["data", "show", "d", "--root", str(tmp_path / "data")]) == 3
    assert "is not a built data set" in " ".join(capfd.readouterr().err.split())


def other_thing(kind: str, path: Path) -> None:
    """Put something in a file's place that is no regular file."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            here = Path.cwd()
            os.chdir(path.parent)  # a socket's path is short
            bound.bind(path.name)
            os.chdir(here)


@pytest.mark.usefixtures("ends")
def test_what_is_no_file_in_a_file_s_place_is_named(build, config_of, tmp_path, capfd):
    from flatout.config.read import dump_config

    assert build("few") == 0
    run = tmp_path / "run.yaml"
    run.write_text(dump_config(config_of("run")))
    assert main(["train", str(run)]) == 0
    folder, whole = tmp_path / "data" / "built_dataset" / "d", tmp_path / "whole"
    shutil.copytree(tmp_path / "data", whole)
    names = [path.relative_to(tmp_path / "data") for path in sorted(folder.iterdir())] + [Path("data_config.json")]
    assert any(path.name.startswith("reference_") for path in names)
    for name, kind in zip(names, cycle(["pipe", "folder", "device", "socket"])):
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(whole, tmp_path / "data")
        other_thing(kind, tmp_path / "data" / name)
        for command in (
            ["train", str(run), f"run_dir={tmp_path / 'again'}"],
            ["data", "show", "d", "--root", str(tmp_path / "data")],
        ):
            capfd.readouterr()
            code, said = main(command), capfd.readouterr()
            if name.name == "report.json":  # a list for people; neither command reads it
                assert code == 0
                continue
            text = " ".join(said.err.split())
            assert (code, text.count("error:"), "Traceback" in text) == (3, 1, False), (name, command, said)
            assert str(tmp_path / "data" / name) in text
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(whole, tmp_path / "data")
    assert main(["train", str(run), f"run_dir={tmp_path / 'last'}"]) == 0


def test_a_store_that_a_person_wrote_is_found_by_its_name_and_never_replaced(tiny, tmp_path, capsys):
    store = write_units(tmp_path, tiny.model_dir, [1] * 12, name="own")
    (tmp_path / "data_config.json").unlink()  # a person writes the store alone
    model, rows = f"model={tiny.model_dir}", f"data.sources=[{{path: {tiny.chats}}}]"
    here = ["train", model, "data.name=own", f"data.root={tmp_path}", "device=cpu", "batch.max_steps=1"]
    assert main([*here, f"run_dir={tmp_path / 'run'}"]) == 0
    assert main(["data", "show", "own", "--root", str(tmp_path)]) == 0
    assert "samples 12" in capsys.readouterr().out
    build = ["data", "build", str(tiny.chats), "--tokenizer", str(tiny.model_dir), "--root", str(tmp_path)]
    for words in ([*here, rows, f"run_dir={tmp_path / 'other'}"], [*build, "--name", "own"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "was not made by `flatout data build`" in said
        assert TokenStore.open(store.folder).num_samples == 12
        # what is proposed leaves it alone
        name = next(line for line in said.splitlines() if line.startswith("  try ")).removeprefix("  try ")
        assert main([*words, *shlex.split(name, comments=True)]) == 0
        assert TokenStore.open(store.folder).num_samples == 12
        assert TokenStore.open(tmp_path / "built_dataset" / "own-2").num_samples == 120
    assert main([*build, "--name", "own", "--replace"]) == 0
    assert TokenStore.open(store.folder).num_samples == 120
