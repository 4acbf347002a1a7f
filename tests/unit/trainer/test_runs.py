"""Whole runs on the tiny model: equal seeds, resume at every step, what is reported, what stops a run."""

import json
import math
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_folders import as_after, require_equal, state_of
from safetensors.torch import load_file, save_file

from flatout.config.data import SourceConfig
from flatout.data.build import open_or_build
from flatout.errors import CheckpointError, DataError, NumericError, ResourceError, UsageError
from flatout.io.durable_io import DurableIO
from flatout.optim.lr_schedule import lr_factor
from flatout.parallel.rank import Rank
from flatout.track.callback import MemoryCallback, Reporter
from flatout.track.run_log import read_run
from flatout.trainer import loop
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.run import train


@pytest.fixture(scope="module", params=["lora", "full"])
def uninterrupted(request, tiny, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / request.param
    config = tiny.config(
        run_dir,
        method=request.param,
        lora={"rank": 4, "dropout": 0.2},
        checkpoint={"every_steps": 1, "keep": 20},
        eval={"fraction": 0.1, "every_steps": 3},
    )
    return config, train(config)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(uninterrupted, tiny, tmp_path):
    config, result = uninterrupted
    again = config.model_copy(update={"run_dir": tmp_path / "again"})
    torch.use_deterministic_algorithms(True, warn_only=True)  # as a notebook's cell before may ask
    train(again)
    assert torch.is_deterministic_algorithms_warn_only_enabled(), "torch's settings are as they were"
    require_equal(state_of(result.folder, 8), state_of(tmp_path / "again", 8))
    train(config.model_copy(update={"run_dir": tmp_path / "other", "seed": 8}))
    one, other = (state_of(folder, 8) for folder in (result.folder, tmp_path / "other"))
    name = next(iter(one))
    assert not torch.equal(one[name], other[name])


def test_resume_at_every_step_is_bit_equal(uninterrupted, tmp_path, metrics_of):
    """Of eight steps, the epoch end among them; the resumed run is resumed once more, two steps on."""
    config, result = uninterrupted
    run_dir = tmp_path / "again"
    shutil.copytree(result.folder, run_dir)
    for step in (3, 5):
        as_after(run_dir, step)
        train(config.model_copy(update={"run_dir": run_dir}))
        require_equal(state_of(result.folder, 8), state_of(run_dir, 8))
    losses = [[line["loss"] for line in metrics_of(folder)] for folder in (run_dir, result.folder)]
    assert losses[0] == losses[1]
    assert evals(run_dir)[-1] == evals(result.folder)[-1]


def test_a_resumed_run_reads_the_restored_adapter(tiny, tmp_path, metrics_of):
    """Without dropout LoRA layers run fused, by copies of the adapter, which a resume has to make anew."""
    settings = {
        "checkpoint": {"every_steps": 1, "keep": 20},
        "eval": {"fraction": 0.1, "every_steps": 3},
        "optim": {"lr_ratio": 4.0},
        "model": {"neftune_alpha": 5.0},
        "objective": {"label_smoothing": 0.1, "z_loss": 1e-3},
    }
    whole = tiny.config(tmp_path / "whole", **settings)
    train(whole)
    assert re.search(r"fused +[1-9]\d* layers run as", (tmp_path / "whole" / "train.log").read_text())
    run_dir = as_after(whole.folder, 4, tmp_path / "again")
    train(whole.model_copy(update={"run_dir": run_dir}))
    require_equal(state_of(whole.folder, 8), state_of(run_dir, 8))
    for name, kind in (("loss", "step"), ("eval_loss", "eval")):
        records = [metrics_of(folder, kind) for folder in (run_dir, whole.folder)]
        assert [record[name] for record in records[0]] == [record[name] for record in records[1]]


def test_rope_by_length_resumes_to_the_bit(tiny, length_scaled, tmp_path):
    """What a resumed run has not seen, the long documents of earlier steps, changes nothing."""
    whole = tiny.config(
        tmp_path / "whole",
        model={"name": str(length_scaled)},
        batch={"max_steps": 5},
        checkpoint={"every_steps": 1, "keep": 20},
    )
    train(whole)
    assert "; beyond 64 tokens within" in (tmp_path / "whole" / "train.log").read_text()
    run_dir = as_after(whole.folder, 3, tmp_path / "again")
    train(whole.model_copy(update={"run_dir": run_dir}))
    require_equal(state_of(whole.folder, 5), state_of(run_dir, 5))


def evals(run_dir: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["eval_loss"]) for line in lines if line["kind"] == "eval"]


def test_a_complete_run_is_left_as_it_is(uninterrupted, tmp_path):
    config, result = uninterrupted
    run_dir = tmp_path / "run"
    shutil.copytree(result.folder, run_dir)
    before = {path: path.read_bytes() for path in results_of(run_dir)}
    for changes in ({}, {"name": "other", "log_every_steps": 3, "compile": "off"}):
        again = train(config.model_copy(update={"run_dir": run_dir, **changes}))
        assert again.progress.step == 8
    assert {path: path.read_bytes() for path in results_of(run_dir)} == before


def results_of(run_dir: Path) -> list[Path]:
    return [path for name in ("checkpoints", "final", "best") for path in (run_dir / name).rglob("*") if path.is_file()]


def test_what_is_reported_is_true(uninterrupted, metrics_of):
    config, result = uninterrupted
    planned = open_and_plan(config, Reporter(), Rank())
    records = metrics_of(result.folder)
    assert [record["step"] for record in records] == list(range(1, 9))
    for record, step in zip(records, planned.plan.steps(), strict=True):
        ids = list(step.sample_ids)
        assert record["num_tokens"] == planned.store.lengths[ids].sum()
        assert record["num_label_tokens"] == sum(int(planned.store.sample(i).loss_mask.sum()) for i in ids)
        assert record["num_samples"] == len(ids)
        # one of eight updates is warm-up (3 % rounded up); the rate moves once an update, never once a micro-batch
        assert record["lr"] == pytest.approx(1e-3 * lr_factor(config.schedule, step.index, 8), rel=1e-15)
        assert record["tokens_per_s"] == pytest.approx(record["num_tokens"] / record["step_s"], rel=1e-9)
        assert record["data_wait_s"] < record["step_s"]
        assert 0 <= record["padding_avoided"] < 1
        # a CPU needs no filler
        assert record["processed_tokens_per_s"] == pytest.approx(record["tokens_per_s"], rel=1e-9)
        assert record["memory_bytes"] == record["mean_peak_memory_bytes"] > 1 << 20
    phases = ("forward_s", "backward_s", "gradient_sum_s", "checkpoint_wait_s", "optimizer_s")
    for before, record in pairwise(records):
        # a record has the phases of the step before
        assert 0 < sum(record[phase] for phase in phases) <= before["step_s"]
        assert min(record["forward_s"], record["backward_s"], record["optimizer_s"]) > 0
    assert records[0]["eta_s"] > 0
    assert records[-1]["eta_s"] == 0
    assert records[-1]["epoch"] == pytest.approx(8 / planned.plan.steps_per_epoch)
    progress = result.progress
    assert progress.num_tokens == sum(record["num_tokens"] for record in records)
    assert progress.num_updates == 8
    assert [step for step, _ in evals(result.folder)] == [0, 3, 6, 8]
    best_step, best_loss = min(evals(result.folder), key=lambda item: item[1])
    assert (progress.best_step, progress.best_eval_loss) == (best_step, best_loss)


def test_a_run_folder_says_what_ran_and_how_it_ended(uninterrupted):
    config, result = uninterrupted
    log = read_run(result.folder)
    assert log.start is not None
    assert log.end is not None
    assert (log.end.outcome, log.end.exit_code, log.end.final_dir) == ("complete", 0, str(result.final_dir))
    assert [record.step for record in log.steps] == list(range(1, 9))
    assert [record.step for record in log.evals] == [0, 3, 6, 8]
    assert log.num_bad_lines == 0
    # nothing is known of a CPU
    assert {(record.gpu_watts, record.gpu_use) for record in log.steps} == {(None, None)}
    plan = log.start.plan
    assert log.start.settings["optim.lr"] == config.optim.lr
    assert (log.start.num_trained_parameters < log.start.num_parameters) == (config.method == "lora")
    assert (plan.num_steps, plan.samples_per_step) == (8, config.batch.samples_per_step)
    assert sum(plan.length_counts) == plan.num_samples
    for record, step in zip(log.steps, plan.packing, strict=False):
        assert sum(length for rank in step for batch in rank for length in batch) == record.num_tokens


def test_a_resume_with_other_planned_micro_batches_says_so(tiny, tmp_path, monkeypatch):
    """As on a GPU whose free memory differs; the settings are the same."""
    batch = {"micro_batch_tokens": None, "max_steps": 4}
    config = tiny.config(tmp_path / "run", batch=batch, checkpoint={"every_steps": 2, "keep": 20})
    train(config)
    for num_tokens, is_said in ((8192, False), (1000, True)):
        as_after(tmp_path / "run", 2)
        monkeypatch.setattr("flatout.planner.memory.budget.CPU_MICRO_BATCH_TOKENS", num_tokens)
        train(config)
        said = "micro-batch tokens: 8192 in the checkpoint, 1000 now"
        assert (said in (tmp_path / "run" / "events.jsonl").read_text()) is is_said


def test_a_non_finite_loss_stops_before_the_update(tiny, tmp_path):
    config = tiny.config(
        tmp_path / "run",
        method="full",
        optim={"name": "sgd", "lr": 1e30, "max_grad_norm": None},
        schedule={"kind": "constant", "warmup_steps": 0},
        checkpoint={"every_steps": 1},
    )
    with pytest.raises(
        NumericError, match=r"step 2: loss .*the weights were not updated; samples \d+ \(.*chats\.jsonl:\d+\)"
    ) as caught:
        train(config)
    assert caught.value.exit_code == 5
    facts = json.loads((tmp_path / "run" / "non_finite.json").read_text())
    assert facts["step"] == 2
    assert len(facts["samples"]) == 6
    assert all(re.fullmatch(r".*chats\.jsonl:\d+", origin) for origin in facts["samples"].values())
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-1"]
    assert all(
        torch.isfinite(tensor).all()
        for tensor in load_file(tmp_path / "run/checkpoints/step-1/model.safetensors").values()
    )


def test_weights_that_an_update_made_infinite_are_never_saved(tiny, tmp_path):
    """Loss and gradient of the only step are finite; nothing but the state itself can tell."""
    shutil.copytree(tiny.model_dir, tmp_path / "model")
    weights_file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights_file)
    name = "model.embed_tokens.weight"
    # the tied head: so large that the gradient is 1e10
    save_file({**tensors, name: tensors[name] * 1e10}, weights_file, {"format": "pt"})
    config = tiny.config(
        tmp_path / "run",
        method="full",
        model={"name": str(tmp_path / "model"), "precision": "fp32"},
        data={"tokenizer": str(tiny.model_dir)},
        optim={"name": "sgd", "lr": 1e30, "max_grad_norm": None},
        schedule={"kind": "constant", "warmup_steps": 0},
        batch={"max_steps": 1},
    )
    with pytest.raises(NumericError, match=r"after step 1: model\..* is not finite, so this state was not saved"):
        train(config)
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    assert not (tmp_path / "run" / "final").exists()
    with pytest.raises(UsageError, match=r"optim\.lr"):
        tiny.config(tmp_path / "run", optim={"lr": 1e308})


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_step_that_fp16_skips_is_no_update(tiny, tmp_path, metrics_of, capsys, method):
    """The last norm is so large that fp16 gradients overflow until the loss scale has come down."""
    shutil.copytree(tiny.model_dir, tmp_path / "model")
    weights_file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights_file)
    name = "model.norm.weight"
    save_file({**tensors, name: tensors[name] * 1000}, weights_file, {"format": "pt"})
    config = tiny.config(
        tmp_path / "run",
        method=method,
        model={"name": str(tmp_path / "model"), "precision": "fp16"},
        data={"tokenizer": str(tiny.model_dir)},
        batch={"max_steps": 10},
        checkpoint={"every_steps": 1, "keep": 20},
    )
    result = train(config)
    told = re.findall(r"skipped +step (\d+): fp16 overflow", capsys.readouterr().out)
    skipped = {int(step) for step in told}
    assert 0 < len(skipped) < 9, "some steps are skipped, and some after them are not"
    num_updates = 0
    for record in metrics_of(result.folder):
        expected = config.optim.lr * lr_factor(config.schedule, num_updates, 10)
        assert record["lr"] == pytest.approx(expected, rel=1e-12), f"step {record['step']}"
        num_updates += record["step"] not in skipped
    assert result.progress.num_updates == num_updates == 10 - len(skipped)
    for step in range(2, 11):
        old, new = (load_file(tmp_path / f"run/checkpoints/step-{n}/model.safetensors") for n in (step - 1, step))
        assert all(torch.equal(old[key], new[key]) for key in old) == (step in skipped)


def test_a_long_evaluation_on_a_cpu_comes_after_the_first_steps(tiny, tmp_path, monkeypatch):
    """A person sees the loss fall first; a short one comes before them, as in all other tests."""
    config = tiny.config(tmp_path / "run", batch={"max_steps": 14}, eval={"fraction": 0.1})
    monkeypatch.setattr(loop, "LONG_EVAL_FLOPS", 0)
    train(config)
    log = read_run(tmp_path / "run")
    assert [one.step for one in log.evals] == [loop.LATE_STEPS, 14]
    assert f"first after step {loop.LATE_STEPS}, or at the end" in (tmp_path / "run" / "train.log").read_text()
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "run", again)
    as_after(again, loop.LATE_STEPS)
    train(config.model_copy(update={"run_dir": again}))
    assert [one.step for one in read_run(again).evals][-1] == 14
    require_equal(state_of(tmp_path / "run", 14), state_of(again, 14))


def test_early_stop_keeps_the_best(tiny, tmp_path):
    config = tiny.config(
        tmp_path / "run",
        method="full",
        batch={"max_steps": 40},
        optim={"lr": 1e-2},
        schedule={"kind": "constant", "warmup_steps": 0},
        # a new best must be lower by a nat, which stops coming soon
        eval={"fraction": 0.1, "every_steps": 2, "patience": 2, "min_delta": 1.0},
    )
    result = train(config)
    assert result.progress.stopped_early
    assert result.progress.step < 40
    assert result.progress.step == (result.progress.best_step or 0) + 4
    assert train(config).progress.step == result.progress.step


def test_the_final_adapter_is_the_last_checkpoint(uninterrupted):
    config, result = uninterrupted
    name = "adapter_model.safetensors" if config.method == "lora" else "model.safetensors"
    final = load_file(result.final_dir / name)
    total = sum(tensor.double().abs().sum().item() for tensor in final.values())
    last = load_file(result.folder / "checkpoints" / "step-8" / "model.safetensors")
    assert math.isclose(total, sum(tensor.double().abs().sum().item() for tensor in last.values()), rel_tol=1e-12)
    assert (result.final_dir / "tokenizer.json").exists()


def test_a_full_disk_at_a_save_does_not_stop_training(tiny, tmp_path, monkeypatch):
    """The disk is full at the first save only: the run goes on, says so, and saves again later."""
    whole = DurableIO.require_free
    calls = []

    def full_at_first(self: DurableIO, folder: Path, needed_bytes: int) -> None:
        calls.append(needed_bytes)
        if len(calls) == 4:  # the first three ask before the first step
            raise ResourceError(f"disk full: {folder} needs {needed_bytes} bytes")
        whole(self, folder, needed_bytes)

    monkeypatch.setattr(DurableIO, "require_free", full_at_first)
    config = tiny.config(tmp_path / "run", checkpoint={"every_steps": 3, "keep": 5})
    train(config)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-6", "step-8"]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "not_saved"] == [3]


def test_a_run_goes_on_with_the_data_set_of_earlier_mask_rules(tiny, tmp_path, monkeypatch):
    sections = {"checkpoint": {"every_steps": 1, "keep": 5}, "batch": {"max_steps": 2}}
    config = tiny.config(tmp_path / "run", data={"root": str(tmp_path / "data")}, **sections)
    with monkeypatch.context() as earlier:
        earlier.setattr("flatout.data.token_store.MASK_RULES", 0)
        train(config)
    weights = (tmp_path / "run/final/adapter_model.safetensors").read_bytes()
    as_after(tmp_path / "run", 1)
    train(config)
    said = " ".join((tmp_path / "run/train.log").read_text().split())
    assert "earlier rules of which tokens carry loss; the run continues with it" in said
    assert (tmp_path / "run/final/adapter_model.safetensors").read_bytes() == weights
    # rebuilt by another command, in between
    as_after(tmp_path / "run", 1)
    open_or_build(config.data, config.model.name)
    with pytest.raises(CheckpointError, match=r"- data: .* in the checkpoint"):
        train(config)


def test_a_tokenizer_larger_than_the_model_is_told_before_loading(tiny, tmp_path):
    shutil.copytree(tiny.model_dir, tmp_path / "small")
    shape = json.loads((tmp_path / "small" / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps({**shape, "vocab_size": 100}))
    (tmp_path / "small" / "model.safetensors").unlink()
    config = tiny.config(tmp_path / "run", model={"name": str(tmp_path / "small"), "init": "random"})
    with pytest.raises(DataError, match=r"token ids 100\.\.\d+, but the model has 100 embedding rows"):
        train(config)


def test_training_rows_in_an_evaluation_set_are_told(tiny, tmp_path):
    rows = tiny.chats.read_text().splitlines(keepends=True)[:40]
    (tmp_path / "twice.jsonl").write_text("".join(rows * 2))
    (tmp_path / "some.jsonl").write_text("".join(rows[:20]))
    config = tiny.config(tmp_path / "any")
    for name in ("twice", "some"):
        source = SourceConfig(path=str(tmp_path / f"{name}.jsonl"))
        changes = {"name": name, "root": tmp_path / "data", "sources": [source]}
        open_or_build(config.data.model_copy(update=changes), config.model.name)

    def overlaps(name: str, evaluation: dict[str, Any]) -> list[int]:
        data = {"name": "twice", "root": str(tmp_path / "data"), "sources": []}
        train(tiny.config(tmp_path / name, data=data, eval=evaluation, batch={"max_steps": 1}))
        events = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        return [event["eval_samples_also_trained_on"] for event in events if event["kind"] == "overlap"]

    assert overlaps("other", {"data": "some"}) == [20]
    # equal rows are on one side of the split
    assert overlaps("held-out", {"fraction": 0.25}) == []


@pytest.mark.parametrize(("samples_per_step", "is_told"), [(24, True), (12, False)])
def test_a_run_of_few_steps_is_told(tiny, tmp_path, samples_per_step, is_told):
    """Of 5 steps, and of 10; 120 samples."""
    told, batch = MemoryCallback(), {"samples_per_step": samples_per_step, "max_steps": None}
    open_and_plan(tiny.config(tmp_path / "run", batch=batch), Reporter(told), Rank())
    assert ("few_steps" in dict(told.events)) is is_told


def test_no_copy_of_an_evaluation_row_is_trained_on(tiny, tmp_path):
    data = {"root": str(tmp_path / "data"), "sources": [{"path": str(tiny.chats), "weight": 2}], "num_samples": None}
    planned = open_and_plan(tiny.config(tmp_path / "run", data=data, eval={"fraction": 0.25}), Reporter(), Rank())
    held_out = list(planned.eval_sets[0].step.sample_ids)
    trained = np.setdiff1d(np.arange(planned.store.num_samples), held_out)
    assert set(trained) >= {i for step in planned.plan.steps() for i in step.sample_ids}
    assert not set(planned.store.row_keys[trained]) & set(planned.store.row_keys[held_out])
