"""Units of mixed sizes over processes: ranks, and ranks that share each micro-batch, take the steps of one process."""

import json

import numpy as np
import pytest
from unit_store import write_units

from flatout.cli.main import main

SIZES = [2, 3, 1, 2, 4, 1, 2, 2, 1, 3, 2, 2]


@pytest.mark.parametrize("more", [["two"], pytest.param(["sharded", "context"], marks=pytest.mark.exhaustive)])
def test_ranks_take_the_same_units_to_the_same_losses(tiny, tmp_path, metrics_of, more):
    store = write_units(tmp_path, tiny.model_dir, SIZES)
    (tmp_path / "run.yaml").write_text(
        f"run_dir: {tmp_path / 'one'}\ndevice: cpu\nmodel: {{name: '{tiny.model_dir}', precision: fp64}}\n"
        f"data: {{name: units, root: '{tmp_path}'}}\nlora: {{rank: 4, alpha: 8}}\n"
        "eval: {fraction: 0.2, prompts: []}\nbatch: {samples_per_step: 5, max_steps: 3, micro_batch_tokens: 600}\n"
    )
    runs = {
        "one": [],
        "two": ["gpus=[0,1]"],
        "sharded": ["gpus=[0,1]", "strategy=zero3"],
        "context": ["gpus=[0,1]", "context.parallel=2", "batch.share_prefix=off"],
    }
    for name in ("one", *more):
        assert main(["train", str(tmp_path / "run.yaml"), f"run_dir={tmp_path / name}", *runs[name]]) == 0, name
    expected, evaluated = (metrics_of(tmp_path / "one", kind) for kind in ("step", "eval"))
    assert sum(each["shared_share"] for each in expected) > 0
    for name in more:
        found = metrics_of(tmp_path / name)
        for a, b in zip(expected, found, strict=True):
            # norms compute in float32, of rows that shared prompts have once
            assert [b["loss"], b["grad_norm"]] == pytest.approx([a["loss"], a["grad_norm"]], rel=1e-6)
            assert (a["num_tokens"], a["num_label_tokens"]) == (b["num_tokens"], b["num_label_tokens"])
        losses = [each["eval_loss"] for each in metrics_of(tmp_path / name, "eval")]
        assert losses == pytest.approx([each["eval_loss"] for each in evaluated], rel=1e-6)
        worst = [
            [one[key] for each in metrics_of(tmp_path / name, "eval") for one in each["worst"]]
            for key in ("row", "loss")
        ]
        assert worst[0] == [one["row"] for each in evaluated for one in each["worst"]]
        assert worst[1] == pytest.approx([one["loss"] for each in evaluated for one in each["worst"]], rel=1e-5)
    assert store.unit_offsets is not None
    assert np.diff(store.unit_offsets).tolist() == SIZES


@pytest.mark.exhaustive
def test_verify_proves_every_cut_of_units_that_may_be_parted(tiny, tmp_path):
    write_units(tmp_path, tiny.model_dir, SIZES)
    (tmp_path / "run.yaml").write_text(
        f"run_dir: {tmp_path / 'run'}\ndevice: cpu\nmodel: {{name: '{tiny.model_dir}', precision: fp32}}\n"
        f"data: {{name: units, root: '{tmp_path}'}}\nlora: {{rank: 4, alpha: 8}}\neval: {{prompts: []}}\n"
        "batch: {samples_per_step: 5, max_steps: 3, micro_batch_tokens: 600}\n"
    )
    assert main(["verify", str(tmp_path / "run.yaml"), "--ranks", "2"]) == 0
    rows = {row["case"]: row for row in json.loads((tmp_path / "run" / "verify.json").read_text())["rows"]}
    assert {"packed", "each sample alone", "ddp", "zero3"} <= rows.keys()
    assert max(row["worst_difference"] for row in rows.values()) < 1e-4
