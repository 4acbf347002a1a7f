"""Runs that train what reads pictures: ranks, resuming, checks, the adapter's file, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from picture_world import make_picture_model, write_rows
from safetensors.torch import load_file

from flatout.cli.main import main
from flatout.models.blocks import part_of

BOTH = ["model.freeze_vision_tower=false", "model.freeze_projector=false"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tower_runs")
    rows = write_rows(root).read_text().splitlines(keepends=True)
    # many texts, so that some passes and some steps have no picture
    (root / "rows.jsonl").write_text("".join([*rows, *(row for row in rows if "image" not in row)] * 2))
    (root / "texts.jsonl").write_text("".join(row for row in rows if "image" not in row))
    make_picture_model(root / "model", "qwen2_5_vl")
    return root


def command(world: Path, folder: Path, *more: str, verb: str = "train", rows: str = "rows") -> list[str]:
    path = folder / "run.yaml"
    path.write_text(
        f"run_dir: {folder / 'one'}\ndevice: cpu\nmodel: {{name: '{world / 'model'}', precision: fp64}}\n"
        f"data: {{name: {rows}, root: '{world / 'data'}', sources: [{{path: '{world / rows}.jsonl'}}]}}\n"
        "eval: {fraction: 0.1, prompts: []}\ncheckpoint: {every_steps: 1, keep: 9}\n"
        "batch: {samples_per_step: 2, max_steps: 6, micro_batch_tokens: 120}\n"
    )
    return [verb, str(path), *([] if "method=full" in more else ["lora.rank=4"]), *more]


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.exhaustive)])
def test_ranks_take_the_steps_of_one_process_and_a_resumed_run_ends_with_the_same_bits(
    world: Path, tmp_path: Path, metrics_of: Any, method: str
) -> None:
    """Of two samples a step, one rank's may be texts, and both may."""
    train = command(world, tmp_path, *BOTH, f"method={method}")
    assert main(train) == 0
    assert main([*train, f"run_dir={tmp_path / 'two'}", "gpus=[0,1]"]) == 0
    for kind, name in (("step", "loss"), ("step", "grad_norm"), ("eval", "eval_loss")):
        one, two = ([record[name] for record in metrics_of(tmp_path / run, kind)] for run in ("one", "two"))
        assert two == pytest.approx(one, rel=1e-9)
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "one", again)
    for folder in (again / "final", *(again / "checkpoints").glob("step-[3456]")):
        shutil.rmtree(folder)
    assert main([*train, f"run_dir={again}"]) == 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, truth = (load_file(tmp_path / run / "checkpoints" / "step-6" / name) for run in ("again", "one"))
        assert ours.keys() == truth.keys()
        assert all(torch.equal(ours[key], truth[key]) for key in truth)
    trained = [name for name in truth if "visual" in name]
    assert {part_of(name) for name in trained} == {"vision_tower", "projector"}


@pytest.mark.parametrize(("method", "level"), [("lora", "none"), ("full", "full")])
def test_verify_compares_gradients_of_the_tower(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, method: str, level: str
) -> None:
    check = command(
        world, tmp_path, *BOTH, f"method={method}", f"recompute={level}", "--fp64", "--ranks=1", verb="verify"
    )
    assert main(check) == 0
    rows = json.loads((tmp_path / "one" / "verify.json").read_text())["rows"]
    assert max(row["worst_difference"] for row in rows if row["case"].startswith("packed")) < 1e-6
    monkeypatch.setattr("flatout.models.blocks.trains_tower", lambda model: False)
    assert main(check) != 0


def test_one_part_is_trained_alone(world: Path, tmp_path: Path) -> None:
    assert main(command(world, tmp_path, BOTH[1], "method=full", "freeze=[language_model,lm_head]")) == 0
    before, after = (load_file(at / "model.safetensors") for at in (world / "model", tmp_path / "one" / "final"))
    changed = {name for name, value in after.items() if not torch.equal(value.float(), before[name].float())}
    assert {part_of(name) for name in changed} == {"projector"}
    assert all("visual" in name for name in changed)


REFUSED = {
    "a target in a frozen tower": (["lora.targets=[qkv]"], "'qkv' is only in the vision tower, which stays frozen"),
    "targets elsewhere": ([*BOTH, "lora.targets=[q_proj,mlp.0]"], "model.freeze_vision_tower: false, but nothing"),
    "fsdp": ([*BOTH, "gpus=[0,1]", "strategy=fsdp"], "is not proved with strategy fsdp"),
    "nf4": ([*BOTH, "base.storage=nf4", "model.precision=fp32"], "is not proved with base.storage=nf4"),
    "no pictures": ([BOTH[0]], "has no pictures to train it"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_trained_is_refused_by_name(world: Path, tmp_path: Path, capfd: Any, what: str) -> None:
    options, says = REFUSED[what]
    assert main(command(world, tmp_path, *options, rows="texts" if what == "no pictures" else "rows")) == 2
    assert says in " ".join("".join(capfd.readouterr()).split())


def test_targets_in_the_tower_are_named(world: Path, tmp_path: Path) -> None:
    assert main(command(world, tmp_path, BOTH[0], "lora.targets=[qkv]")) == 0
    names = load_file(tmp_path / "one" / "final" / "adapter_model.safetensors").keys()
    assert names
    assert all(".visual.blocks." in name and ".qkv." in name for name in names)
    assert main(["merge", str(tmp_path / "one"), "--out", str(tmp_path / "merged")]) == 0
    before, after = (load_file(at / "model.safetensors") for at in (world / "model", tmp_path / "merged"))
    changed = {name for name, value in after.items() if not torch.equal(value.float(), before[name].float())}
    assert changed
    assert all(name.endswith("qkv.weight") for name in changed)
