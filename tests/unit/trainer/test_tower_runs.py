"""Runs that train what reads pictures: ranks, resuming, checks, the adapter's file, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from picture_world import make_picture_model, write_rows
from run_folders import as_after, require_equal
from safetensors.torch import load_file

from flatout.cli.main import main
from flatout.models.blocks import part_of
from tests.usual import usual

BOTH = ["model.freeze_vision_tower=false", "model.freeze_projector=false"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
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


# the settings of ranks that take the steps of one process; the first by default
RANKS = {
    "lora fsdp": ["strategy=fsdp"],
    "full zero2": ["strategy=zero2"],
    "lora ddp": ["strategy=ddp"],
    "lora zero1": ["strategy=zero1"],
    "lora zero2": ["strategy=zero2"],
    "lora zero3": ["strategy=zero3"],
    "lora offload": ["strategy=fsdp", "sharding.offload=true"],
    "full ddp": ["strategy=ddp"],
    "full zero1": ["strategy=zero1"],
    "full fsdp": ["strategy=fsdp"],
    "full zero3": ["strategy=zero3"],
    "full offload": ["strategy=zero3", "sharding.offload=true"],
}


@pytest.mark.parametrize("case", usual(RANKS, ["lora fsdp"]))
def test_ranks_take_the_steps_of_one_process_and_a_resumed_run_ends_with_the_same_bits(
    world, tmp_path, metrics_of, case
):
    """Of two samples a step, one rank's may be texts, and both may."""
    train = command(world, tmp_path, *BOTH, f"method={case.split()[0]}", "model.neftune_alpha=5")
    assert main(train) == 0
    ranks = [*train, "gpus=[0,1]", *RANKS[case]]
    assert main([*ranks, f"run_dir={tmp_path / 'two'}"]) == 0
    for kind, name in (("step", "loss"), ("step", "grad_norm"), ("eval", "eval_loss")):
        one, two = ([record[name] for record in metrics_of(tmp_path / run, kind)] for run in ("one", "two"))
        assert two == pytest.approx(one, rel=1e-9)
    events = (tmp_path / "two" / "events.jsonl").read_text()
    assert "peer_lost" not in events, "the run had to start again"
    again = as_after(tmp_path / "two", 2, tmp_path / "again")
    assert main([*ranks, f"run_dir={again}"]) == 0
    saved = sorted((tmp_path / "two" / "checkpoints" / "step-6").glob("*.safetensors"))
    assert len(saved) >= 2
    trained = set[str]()
    for file in saved:
        ours, truth = load_file(again / "checkpoints" / "step-6" / file.name), load_file(file)
        require_equal(ours, truth)
        trained |= {name for name in truth if "visual" in name}
    assert {part_of(name) for name in trained} == {"vision_tower", "projector"}


@pytest.mark.parametrize("storage", ["nf4", pytest.param("fp8", marks=pytest.mark.exhaustive)])
def test_gradients_over_a_quantized_decoder_are_those_of_peft(world, tmp_path, storage):
    """The tower and the projector are not quantized; float8 products are compared as they are in 16 bit."""
    stored = ["model.precision=fp32", f"base.storage={storage}", "--ranks=1"]
    assert main(command(world, tmp_path, *BOTH, *stored, verb="verify")) == 0
    rows = json.loads((tmp_path / "one" / "verify.json").read_text())["rows"]
    packed = [row["worst_difference"] for row in rows if row["case"].startswith("packed")]
    assert packed
    assert max(packed) < 1e-4


def test_updates_in_the_backward_pass_are_those_of_a_step(world, tmp_path, metrics_of):
    """Steps of texts alone too, which give the tower gradients of zero."""
    one_pass = ["method=full", "optim.max_grad_norm=null", "batch.micro_batch_tokens=2000"]
    train = command(world, tmp_path, *BOTH, *one_pass)
    assert main(train) == 0
    assert main([*train, "full.update=backward", f"run_dir={tmp_path / 'two'}"]) == 0
    ours, truth = (load_file(tmp_path / run / "checkpoints/step-6/model.safetensors") for run in ("two", "one"))
    for name in truth:
        torch.testing.assert_close(ours[name], truth[name], rtol=1e-9, atol=1e-12, msg=name)
    pictured = [record["grad_norm"] for record in metrics_of(tmp_path / "two")]
    assert pictured == pytest.approx([record["grad_norm"] for record in metrics_of(tmp_path / "one")], rel=1e-9)


@pytest.mark.parametrize(("method", "level"), usual([("lora", "none"), ("full", "full")], [("full", "full")]))
def test_verify_compares_gradients_of_the_tower(world, tmp_path, monkeypatch, capfd, method, level):
    check = command(
        world, tmp_path, *BOTH, f"method={method}", f"recompute={level}", "--fp64", "--ranks=1", verb="verify"
    )
    assert main(check) == 0
    rows = json.loads((tmp_path / "one" / "verify.json").read_text())["rows"]
    assert max(row["worst_difference"] for row in rows if row["case"].startswith("packed")) < 1e-6
    monkeypatch.setattr("flatout.models.blocks.trains_tower", lambda model: False)
    assert main(check) != 0


def test_one_part_is_trained_alone(world, tmp_path):
    assert main(command(world, tmp_path, BOTH[1], "method=full", "freeze=[language_model,lm_head]")) == 0
    before, after = (load_file(at / "model.safetensors") for at in (world / "model", tmp_path / "one" / "final"))
    changed = {name for name, value in after.items() if not torch.equal(value.float(), before[name].float())}
    assert {part_of(name) for name in changed} == {"projector"}
    assert all("visual" in name for name in changed)


REFUSED = {
    "a target in a frozen tower": (["lora.targets=[qkv]"], "'qkv' is only in the vision tower, which stays frozen"),
    "targets elsewhere": ([*BOTH, "lora.targets=[q_proj,mlp.0]"], "model.freeze_vision_tower: false, but nothing"),
    "a saved module": (["lora.modules_to_save=[merger]"], "visual.merger is in the projector, which stays frozen"),
    "float8 weights": ([*BOTH, "method=full", "full.compute=fp8_rowwise"], "is not proved with full.compute"),
    "float8 gradients": ([*BOTH, "base.backward=fp8", "model.precision=fp32"], "is not proved with base.backward"),
    "no pictures": ([BOTH[0]], "has no pictures to train it"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_trained_is_refused_by_name(world, tmp_path, capfd, what):
    options, says = REFUSED[what]
    assert main(command(world, tmp_path, *options, rows="texts" if what == "no pictures" else "rows")) == 2
    assert says in " ".join("".join(capfd.readouterr()).split())


def test_a_saved_projector_is_trained(world, tmp_path):
    """The accepting twin of the refusals of a saved module and of quantized bases."""
    saves = command(world, tmp_path, *BOTH, "lora.modules_to_save=[merger]", "model.precision=fp32")
    assert main([*saves, "base.storage=nf4"]) == 0
    saved = tmp_path / "one" / "checkpoints"
    before, after = (load_file(saved / f"step-{step}" / "model.safetensors") for step in (1, 6))
    changed = {name for name in after if "merger" in name and not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if "merger" in name} != set()


def test_targets_in_the_tower_are_named(world, tmp_path):
    assert main(command(world, tmp_path, BOTH[0], "lora.targets=[qkv]")) == 0
    names = load_file(tmp_path / "one" / "final" / "adapter_model.safetensors").keys()
    assert names
    assert all(".visual.blocks." in name and ".qkv." in name for name in names)
    assert main(["merge", str(tmp_path / "one"), "--out", str(tmp_path / "merged")]) == 0
    before, after = (load_file(at / "model.safetensors") for at in (world / "model", tmp_path / "merged"))
    changed = {name for name, value in after.items() if not torch.equal(value.float(), before[name].float())}
    assert changed
    assert all(name.endswith("qkv.weight") for name in changed)
