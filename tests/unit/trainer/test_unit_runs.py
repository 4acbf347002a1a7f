"""Units of mixed sizes in whole runs: any cut gives what units give one by one, and a resumed run has the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from built_run import built_run
from run_folders import as_after, require_equal, state_of
from unit_store import write_units

from flatout.cli.main import main
from flatout.data.add_column import add_column
from flatout.data.token_store import TokenStore
from flatout.errors import CheckpointError
from flatout.models.blocks import hidden_states
from flatout.models.packed import PackedBatch
from flatout.parallel.rank import Rank
from flatout.planner.steps.step_plan import MicroBatch, StepPlan
from flatout.track.callback import Reporter
from flatout.trainer.batch_loader import BatchLoader
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.run import train
from flatout.trainer.state import TrainingRun

SIZES = [2, 3, 1, 2, 4, 1, 2, 2, 1, 3, 2, 2]
COLUMNS = ("weight", "ref_logprob", "margin")
DPO = Path(__file__).parents[3] / "examples" / "dpo.py"


def run_of(tiny: Any, root: Path, folder: Path, **sections: Any) -> Any:
    batch = {"samples_per_step": 5, "max_steps": 4, "micro_batch_tokens": 700, **sections.pop("batch", {})}
    return tiny.config(
        folder, model={"name": str(tiny.model_dir), "precision": "fp64"}, batch=batch,
        data={"name": "units", "root": str(root), "sources": []}, **sections,
    )  # fmt: skip


def of_whole_units(config: Any) -> TrainingRun:
    """A run whose passes take units whole, as for `value`; those of the configured loss may part them."""
    planned = open_and_plan(config, Reporter(), Rank())
    samples = planned.plan.samples
    assert samples.parts_units
    plan = replace(planned.plan, samples=replace(samples, parts_units=False))
    return built_run(config, replace(planned, plan=plan))


def value(logprobs: Any, samples: Any, weight: Any, reference: Any, units: Any, margin: Any) -> Any:
    """A loss that reads every column and all samples of a unit: -log sigmoid(sum of log-ratios - margin) of each."""
    ratios = logprobs.new_zeros(len(reference)).index_add(0, samples, logprobs * weight) - reference
    return -F.logsigmoid(0.1 * logprobs.new_zeros(len(margin)).index_add(0, units, ratios) - margin).sum()


def of_batch(run: TrainingRun, batch: PackedBatch) -> Any:
    states = hidden_states(run.model, batch).index_select(0, batch.label_rows)
    logprobs = run.model.get_output_embeddings()(states).log_softmax(-1).gather(-1, batch.label_ids[:, None])[:, 0]
    columns = batch.columns
    return value(
        logprobs, batch.label_samples, columns["weight"], columns["ref_logprob"], batch.sample_units, columns["margin"]
    )


def one_by_one(run: TrainingRun, store: TokenStore, step: StepPlan) -> tuple[float, torch.Tensor]:
    """The loss over the units of a step, each sample alone through the model's own forward pass."""
    total = torch.zeros((), dtype=torch.float64)
    units = store.units_of(np.array(step.sample_ids))
    for unit in np.unique(units):
        ids = [sample for sample, own in zip(step.sample_ids, units, strict=True) if own == unit]
        logprobs, places, weights, reference = [], [], [], []
        for place, sample_id in enumerate(ids):
            sample = store.sample(sample_id, COLUMNS)
            tokens = torch.tensor(sample.token_ids.astype(np.int64))[None]
            document = {"cu_seq_lens_q": torch.tensor([0, tokens.shape[1]], dtype=torch.int32)}
            document |= {"max_length_q": tokens.shape[1]}
            positions = torch.arange(tokens.shape[1])[None]
            logits = run.model(input_ids=tokens, position_ids=positions, use_cache=False, **document).logits[0, :-1]
            own = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
            mask = torch.tensor(np.array(sample.loss_mask[1:]))
            logprobs.append(own[mask])
            weights.append(torch.tensor(np.array(sample.columns["weight"][1:]))[mask])
            places += [place] * int(mask.sum())
            reference.append(float(sample.columns["ref_logprob"]))
        margin = torch.tensor([float(store.sample(ids[0], COLUMNS).columns["margin"])], dtype=torch.float64)
        total = total + value(
            torch.cat(logprobs), torch.tensor(places), torch.cat(weights), torch.tensor(reference, dtype=torch.float64),
            torch.zeros(len(ids), dtype=torch.long), margin,
        )  # fmt: skip
    total.backward()
    return total.item(), gradients(run)


def gradients(run: TrainingRun) -> torch.Tensor:
    found = torch.cat([each.grad.reshape(-1) for each in run.parameters if each.grad is not None]).clone()
    run.optimizer.zero_grad(set_to_none=True)
    return found


def summed(run: TrainingRun, store: TokenStore, ranks: Sequence[Sequence[MicroBatch]]) -> tuple[float, torch.Tensor]:
    total = 0.0
    for own in ranks:
        loader = BatchLoader(store, torch.device("cpu"), max_documents=40, max_prefixes=20, columns=COLUMNS)
        for batch in loader.batches(own):
            loss = of_batch(run, batch)
            loss.backward()
            total += loss.item()
        loader.close()
    return total, gradients(run)


@pytest.mark.parametrize("share", ["on", "off"])
def test_any_cut_gives_what_units_give_one_by_one(tiny, tmp_path, share):
    """1, 3 and 4 micro-batches, and 1 and 2 ranks, with prompts shared and not; fillers of lockstep add nothing."""
    store = write_units(tmp_path, tiny.model_dir, SIZES, declares=share == "on")
    config = run_of(
        tiny, tmp_path, tmp_path / "run", method="full", batch={"share_prefix": share, "samples_per_step": 12}
    )
    run = of_whole_units(config)
    planned = run.planned
    step = planned.plan.step(0)
    assert bool(step.num_shared_tokens) == (share == "on")
    loss, expected = one_by_one(run, store, step)
    found = set()
    largest = int(planned.plan.unit_tokens.max())
    for num_ranks in (1, 2):
        for budget in range(largest, 2400, 20):
            layout = replace(planned.plan.batch_layout, num_ranks=num_ranks, lockstep=num_ranks == 2)
            plan = replace(planned.plan, batch_layout=layout).with_layout(budget, layout.cost, lockstep=layout.lockstep)
            cut = plan.step(0)
            count = max(map(len, cut.by_rank))
            if (num_ranks, count) in found:
                continue
            found.add((num_ranks, count))
            got, gradient = summed(run, store, cut.by_rank)
            assert got == pytest.approx(loss, rel=1e-12)
            # norms compute in float32, of rows that shared prompts have once
            assert ((gradient - expected).norm() / expected.norm()).item() < (1e-6 if share == "on" else 1e-11)
    assert {(1, 1), (1, 3), (1, 4), (2, 1), (2, 2)} <= found


@pytest.mark.parametrize("share", ["on", "off"])
def test_rows_and_resplit_keep_units_and_the_loss(tiny, tmp_path, share):
    """After running out of memory, the same step in smaller micro-batches; `off` also as padded rows."""
    store = write_units(tmp_path, tiny.model_dir, SIZES)
    config = run_of(
        tiny,
        tmp_path,
        tmp_path / "run",
        batch={"share_prefix": share, "layout": "rows" if share == "off" else "packed"},
    )
    run = of_whole_units(config)
    planned = run.planned
    step = planned.plan.step(1)
    assert planned.plan.batch_layout.name == ("rows" if share == "off" else "packed")
    whole, expected = summed(run, store, step.by_rank)
    cut = planned.plan.resplit(step, 0, planned.plan.largest_unit(step.by_rank[0]))
    assert len(cut) > len(step.by_rank[0])
    got, gradient = summed(run, store, [cut])
    assert got == pytest.approx(whole, rel=1e-9)
    assert ((gradient - expected).norm() / expected.norm()).item() < 1e-6


def test_a_resumed_run_has_the_same_bits_and_other_units_are_refused(tiny, tmp_path, metrics_of):
    write_units(tmp_path, tiny.model_dir, SIZES)
    config = run_of(
        tiny, tmp_path, tmp_path / "run", eval={"fraction": 0.2}, checkpoint={"every_steps": 1, "keep": 9},
        batch={"micro_batch_tokens": 500},
    )  # fmt: skip
    train(config)
    records = metrics_of(config.folder)
    assert len(records) == 4
    again = config.model_copy(update={"run_dir": tmp_path / "again"})

    def restart() -> None:
        shutil.rmtree(again.folder, ignore_errors=True)
        as_after(config.folder, 2, again.folder)
        train(again)

    restart()
    require_equal(state_of(config.folder, 4), state_of(again.folder, 4))
    # the same tokens as other units are other steps
    write_units(tmp_path, tiny.model_dir, [2, 3, 1, 2, 4, 1, 2, 2, 1, 3, 4])
    with pytest.raises(CheckpointError, match=r"- plan: .* in the checkpoint"):
        restart()
    write_units(tmp_path, tiny.model_dir, SIZES)
    restart()


def test_a_column_that_no_loss_reads_changes_nothing(tiny, tmp_path):
    """A run on single samples goes on after a column was added to its data, as a run of an earlier release does."""
    store = write_units(tmp_path, tiny.model_dir, [1] * 20, declares=False)
    config = run_of(tiny, tmp_path, tmp_path / "run", checkpoint={"every_steps": 1, "keep": 9})
    train(config)
    whole = state_of(config.folder, 4)
    as_after(config.folder, 3)
    add_column(store.folder, "later", np.ones(20, np.float32), per="sample", meaning="written after step 4")
    train(config)
    require_equal(state_of(config.folder, 4), whole)


def test_units_as_typed(tiny, tmp_path, capsys):
    """`plan` counts units, `data show` lists the columns, and a unit that is too large for a micro-batch is named.

    Only a loss over units needs them whole.
    """
    write_units(tmp_path, tiny.model_dir, SIZES)
    (tmp_path / "run.yaml").write_text(
        f"run_dir: {tmp_path / 'run'}\ndevice: cpu\nmodel: {{name: '{tiny.model_dir}', precision: fp32}}\n"
        f"data: {{name: units, root: '{tmp_path}'}}\nbatch: {{samples_per_step: 5, max_steps: 4}}\n"
    )
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    assert "samples 25 in 12 units, 1.417 epochs" in " ".join(capsys.readouterr().out.split())
    assert main(["data", "show", "units", "--root", str(tmp_path)]) == 0
    assert "column ref_logprob: float64 per sample: log-probability of the answer" in capsys.readouterr().out
    small = ["plan", str(tmp_path / "run.yaml"), "batch.micro_batch_tokens=150", "batch.share_prefix=off"]
    assert main(small) == 0
    write_units(tmp_path, tiny.model_dir, [2] * 12)
    assert main([*small, f"objective.path={DPO}:DPO"]) == 2
    assert "the unit of sample" in capsys.readouterr().err


def test_a_loss_that_needs_a_column_names_it_before_step_0(tiny, tmp_path, capsys, metrics_of):
    store = write_units(tmp_path, tiny.model_dir, [2] * 12, lacks="ref_logprob")
    (tmp_path / "run.yaml").write_text(
        f"run_dir: {tmp_path / 'run'}\ndevice: cpu\nmodel: {{name: '{tiny.model_dir}', precision: fp32}}\n"
        f"data: {{name: units, root: '{tmp_path}'}}\nbatch: {{samples_per_step: 5, max_steps: 2}}\n"
        "checkpoint: {every_steps: 1, keep: 9}\neval: {prompts: []}\n"
        f"lora: {{rank: 4, alpha: 8}}\nobjective: {{path: '{DPO}:DPO'}}\n"
    )
    assert main(["train", str(tmp_path / "run.yaml")]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "data set 'units' has no column 'ref_logprob', which objective" in said
    assert "flatout.data.add_column" in said
    assert not metrics_of(tmp_path / "run")
    reference = -np.arange(1, 25, dtype=np.float32)
    add_column(store.folder, "ref_logprob", reference, per="sample", meaning="by the reference")
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert len(metrics_of(tmp_path / "run")) == 2
    # the column's content is part of the data: a run goes on with the same one only
    as_after(tmp_path / "run", 1)
    add_column(store.folder, "ref_logprob", reference - 1, per="sample", meaning="by the reference")
    assert main(["train", str(tmp_path / "run.yaml")]) == 4
    assert "- data: " in capsys.readouterr().err
    add_column(store.folder, "ref_logprob", reference, per="sample", meaning="by the reference")
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
