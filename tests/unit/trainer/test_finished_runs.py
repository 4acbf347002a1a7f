"""A finished run is never taken for another one, never replaced unasked, and never called complete when it is not."""

import errno
import json
import os
import resource
import shutil
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import as_after
from safetensors.torch import load_file

from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.errors import CheckpointError, ResourceError
from flatout.io.durable_io import Disk
from flatout.track.callback import MemoryCallback
from flatout.trainer.run import train
from tests.usual import usual

ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """A copy of the model to damage, and a run of four steps on it with every checkpoint kept."""
    root = tmp_path_factory.mktemp("finished")
    shutil.copytree(tiny.model_dir, root / "model")
    config = tiny.config(
        root / "run",
        model={"name": str(root / "model"), "precision": "fp32"},
        batch={"samples_per_step": 6, "micro_batch_tokens": 700, "max_steps": 4},
        checkpoint={"every_steps": 2, "keep": 5},
    )
    train(config)
    return config


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run and of its model's folder, with a note of the user's among the results."""
    shutil.copytree(finished.folder, tmp_path / "run")
    (tmp_path / "run" / "final" / "notes.txt").write_text("mine")
    return finished.model_copy(update={"run_dir": tmp_path / "run"})


def command(config: Any, folder: Path, *overrides: str) -> list[str]:
    (folder / "run.yaml").write_text(dump_config(config))
    return ["train", str(folder / "run.yaml"), *overrides]


def events(config: Any, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (config.folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_other_settings_are_refused_by_name(run, tmp_path, capsys):
    before = contents(run.folder / "final")
    for change, said in {
        "optim.lr=1e-4": "optim.lr: 0.001 in the checkpoint, 0.0001 now",
        "seed=8": "seed: 7 in the checkpoint, 8 now",
        "batch.max_steps=3": "batch.max_steps: 4 in the checkpoint, 3 now",
        "method=full lora={}": "method: lora in the checkpoint, full now",
    }.items():
        assert main(command(run, tmp_path, *change.split())) == 4
        error = capsys.readouterr().err
        assert said in error
        assert f"try run_dir={run.folder}-2" in error
        assert "try --restart" in error
    assert contents(run.folder / "final") == before
    assert main(command(run, tmp_path)) == 0
    assert "already complete after 4 steps" in capsys.readouterr().out


def test_a_moved_model_is_the_same_one_and_another_is_refused(run, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(run.model.name, model)
    assert main(command(run, tmp_path, f"model.name={model}")) == 0
    assert "already complete" in capsys.readouterr().out
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**shape, "rms_norm_eps": 1e-5}))
    assert main(command(run, tmp_path, f"model.name={model}")) == 4
    assert f"model.name: {run.model.name} in the checkpoint, {model} now" in capsys.readouterr().err
    allow = "checkpoint.allow_change=[model]"
    assert main(command(run, tmp_path, f"model.name={model}", allow)) == 4  # it would change nothing any more
    assert "is a finished run with different settings:\n" in capsys.readouterr().err


def test_one_flipped_bit_of_the_base_model_is_found(run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(run.model.name, model)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1000] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    # the folder itself, so that no setting differs
    shutil.move(run.model.name, tmp_path / "whole")
    shutil.move(model, run.model.name)
    try:
        for complete in (True, False):
            if not complete:
                as_after(run.folder, 2)
            with pytest.raises(
                CheckpointError, match=r"differs from the checkpoint.s:\n.*model\.safetensors(.*\n)*.*=\[model\]"
            ):
                train(run)
    finally:
        shutil.rmtree(run.model.name)
        shutil.move(tmp_path / "whole", run.model.name)
    train(run)


def test_results_without_a_checkpoint_are_not_replaced(run, tmp_path, capsys):
    shutil.rmtree(run.folder / "checkpoints")
    before = contents(run.folder / "final")
    for change in ("seed=7", "lora.rank=2"):
        assert main(command(run, tmp_path, *change.split())) == 4
        error = capsys.readouterr().err
        assert "holds results, but there is no checkpoint" in error
        assert f" run_dir={run.folder}-2  # a run of its own" in error
    assert contents(run.folder / "final") == before


def test_more_steps_keep_the_earlier_results_and_the_users_files(run):
    before = contents(run.folder / "final")
    allow = run.checkpoint.model_copy(update={"allow_change": ["batch.max_steps"]})
    batch = run.batch.model_copy(update={"max_steps": 6})
    train(run.model_copy(update={"batch": batch, "checkpoint": allow}))
    (aside,) = run.folder.glob("final.old-*")
    kept = contents(aside)
    assert (run.folder / "final" / "notes.txt").read_text() == "mine"
    assert kept == {name: content for name, content in before.items() if name != "notes.txt"}
    assert (run.folder / "final" / ADAPTER).read_bytes() != kept[ADAPTER]
    assert events(run, "kept")[-1]["path"] == str(aside)


def test_every_damaged_result_is_found_and_exported_again(run):
    """As after a power cut: files of the finished run are empty, cut off or gone."""
    final = run.folder / "final"
    whole = contents(final)
    manifest = json.loads(whole.pop("manifest.json"))
    assert set(manifest["files"]) == whole.keys() - {"notes.txt"}
    damages = [lambda path: path.write_bytes(b""), lambda path: os.truncate(path, 10), Path.unlink]
    for number, name in enumerate(sorted(manifest["files"])):
        damages[number % len(damages)](final / name)
    assert train(run).progress.step == 4
    assert {name: content for name, content in contents(final).items() if name != "manifest.json"} == whole
    assert "final" in events(run, "damaged")[-1]["why"]
    (final / "manifest.json").unlink()
    train(run)
    assert (final / "manifest.json").exists()
    num_events = len(events(run, "damaged"))
    assert train(run).progress.step == 4
    assert len(events(run, "damaged")) == num_events


def test_a_run_that_no_checkpoint_of_would_fit_does_not_start(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Disk, "free_bytes", lambda self, path: 10_000)
    config = tiny.config(tmp_path / "run")
    with pytest.raises(ResourceError, match=r"no checkpoint of this run could be saved: .* needs [\d,]+ bytes, 10,000"):
        train(config)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("method", "precision"), usual(product(["lora", "full"], ["fp32", "bf16"]), [("full", "bf16")])
)
def test_a_disk_without_room_for_checkpoint_and_final_is_told_before_the_model_is_loaded(
    tiny, tmp_path, monkeypatch, method, precision
):
    def config_of(name: str) -> Any:
        model = {"name": str(tiny.model_dir), "precision": precision}
        return tiny.config(tmp_path / name, method=method, model=model, batch={"max_steps": 1})

    def size_of(folder: Path) -> int:
        return sum(one.nbytes for path in folder.rglob("*.safetensors") for one in load_file(path).values())

    train(config_of("whole"))
    [checkpoint] = (tmp_path / "whole" / "checkpoints").glob("step-*")
    needs, more = size_of(checkpoint), size_of(tmp_path / "whole" / "final")
    for free, said in {
        needs // 2: "no checkpoint of this run",
        needs + more // 2: "no final/ beside a checkpoint",
    }.items():
        monkeypatch.setattr(Disk, "free_bytes", lambda self, path, free=free: free)
        recorder = MemoryCallback()
        with pytest.raises(ResourceError, match=rf"^{said}.*needs [\d,]+ bytes, {free:,} are free"):
            train(config_of("short"), callbacks=[recorder])
        assert not {"model", "plan"} & {name for _, name, _ in recorder.stages}
    monkeypatch.setattr(Disk, "free_bytes", lambda self, path: needs + more + 100_000)
    train(config_of("short"))
    assert (tmp_path / "short" / "final").is_dir()


def test_the_weights_of_a_run_that_cannot_be_saved_are_kept(tiny, tmp_path, monkeypatch):
    """The disk of the run folder fills up once training runs: no checkpoint, and perhaps no final/ either."""
    other = tmp_path / "other disk"
    other.mkdir()
    train(tiny.config(tmp_path / "free", batch={"max_steps": 2}))
    expected, create = load_file(tmp_path / "free" / "final" / ADAPTER), Disk.create
    for name, full in {"run": {"checkpoints"}, "also final": {"checkpoints", ".final.tmp"}}.items():

        def refuse(self: Disk, path: Path, name: str = name, full: set[str] = full) -> int:
            if path.is_relative_to(tmp_path / name) and full & set(path.parts):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return create(self, path)

        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(other))
            patch.setattr(Disk, "create", refuse)
            with pytest.raises(ResourceError, match="the final weights are kept in ") as raised:
                train(tiny.config(tmp_path / name, batch={"max_steps": 2}))
        folder = Path(str(raised.value).rpartition("the final weights are kept in ")[2].partition("; the same")[0])
        assert folder.is_relative_to(other if name == "also final" else tmp_path / "run" / "final")
        assert all(torch.equal(tensor, expected[key]) for key, tensor in load_file(folder / ADAPTER).items())


def test_a_last_save_that_fails_is_made_good_by_the_same_command(tiny, tmp_path, monkeypatch, capsys):
    create = Disk.create

    def refuse(self: Disk, path: Path) -> int:
        if "step-4.tmp" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return create(self, path)

    def outcome() -> dict[str, Any]:
        return json.loads((config.folder / "end.json").read_text())

    config = tiny.config(tmp_path / "run", batch={"max_steps": 4}, checkpoint={"every_steps": 2})
    words = command(config, tmp_path)
    monkeypatch.setattr(Disk, "create", refuse)
    assert main(words) == 6
    assert "the same command finishes the run" in capsys.readouterr().err
    assert outcome()["outcome"] == "failed"
    before = contents(config.folder / "final")
    monkeypatch.undo()
    assert main(words) == 0
    end = outcome()
    assert (end["outcome"], end["exit_code"], end["why"]) == ("complete", 0, None)
    assert contents(config.folder / "final") == before
    # a complete run stays as it is
    assert main(words) == 0
    assert outcome() == end
    # what was better at step 2 is not exported yet: the steps after the checkpoint are taken again
    manifest = json.loads(before["manifest.json"])
    manifest["progress"] |= {"best_step": 2, "best_eval_loss": 1.0}
    (config.folder / "final" / "manifest.json").write_text(json.dumps(manifest))
    assert main(words) == 0
    assert [event["step"] for event in events(config, "resumed")] == [2]
    assert (config.folder / "checkpoints" / "step-4").exists()
    tensors = load_file(config.folder / "final" / ADAPTER)
    (config.folder / "before").write_bytes(before[ADAPTER])
    assert all(torch.equal(tensor, load_file(config.folder / "before")[name]) for name, tensor in tensors.items())


def test_a_limit_on_file_sizes_at_the_export_is_one_error_and_costs_no_step(tiny, tmp_path, capsys):
    """The tokenizer is the largest file of this run, written by a library of its own."""
    config = tiny.config(tmp_path / "run", lora={"rank": 1}, batch={"max_steps": 2})
    words = command(config, tmp_path)
    found = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tiny.model_dir / "tokenizer.json").stat().st_size - 1, found[1]))
    try:
        assert main(words) == 6
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, found)
    (error,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert "File too large" in error
    assert not (tmp_path / "run" / "final").exists()
    assert main(words) == 0
    assert (tmp_path / "run" / "final" / "tokenizer.json").exists()
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
