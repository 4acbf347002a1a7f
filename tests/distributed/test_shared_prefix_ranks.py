"""A system prompt that samples share, over ranks: every strategy computes the gradients of samples taken alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from test_gloo import finish, start

from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.trainer.run import train

SYSTEM = " ".join(f"Rule {number}: answer in one full sentence, and name what you do not know." for number in range(8))


def run_of(tiny: Any, root: Path, precision: str) -> Any:
    rows = [json.loads(line)["messages"] for line in tiny.chats.read_text().splitlines()]
    told = [[{"role": "system", "content": SYSTEM}, *messages] if place % 5 else messages
            for place, messages in enumerate(rows) if messages[0]["role"] != "system"]  # fmt: skip
    path = root / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in told))
    return tiny.config(
        root / "one",
        model={"name": str(tiny.model_dir), "precision": precision},
        data={"name": "told", "root": str(root / "data"), "sources": [{"path": str(path)}], "max_tokens": 1500},
        batch={"samples_per_step": 7, "micro_batch_tokens": 1500, "max_steps": 6, "share_prefix": "on"},
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_equal_one_process(tiny, tmp_path, metrics_of, num_ranks):
    config = run_of(tiny, tmp_path, "fp64")
    train(config)
    many = config.model_copy(update={"run_dir": tmp_path / "many"})
    assert finish(start(many, tmp_path / "ranks", num_ranks)) == [0] * num_ranks
    expected, got = metrics_of(config.folder), metrics_of(many.folder)
    assert min(sum(each["shared_share"] for each in records) for records in (expected, got)) > 0.1 * len(got)
    for a, b in zip(expected, got, strict=True):
        # norms compute in float32, of rows that are other copies on each rank
        assert [b["loss"], b["grad_norm"]] == pytest.approx([a["loss"], a["grad_norm"]], rel=1e-6)
        assert (a["num_tokens"], a["num_label_tokens"]) == (b["num_tokens"], b["num_label_tokens"])
    weights = [load_file(folder / "checkpoints/step-6/model.safetensors") for folder in (config.folder, many.folder)]
    for name, tensor in weights[0].items():
        assert float((weights[1][name] - tensor).norm()) <= 1e-5 * float(tensor.norm().clamp(min=1e-3))


def test_ranks_that_share_micro_batches_share_no_prefixes(tiny, tmp_path, capsys):
    config = run_of(tiny, tmp_path, "fp32")
    (tmp_path / "run.yaml").write_text(dump_config(config))
    typed = [str(tmp_path / "run.yaml"), "batch.max_steps=2", "device=cpu"]
    context = ["gpus=[0,1]", "context.parallel=2"]
    assert main(["train", *typed, *context]) == 2
    refusal = "context.parallel: 2 does not work with batch.share_prefix: on"
    assert refusal in capsys.readouterr().err
    auto, why = "batch.share_prefix=auto", "not shared: with context.parallel, ranks share each sample's tokens"
    assert main(["plan", *typed, "--ranks", "2", auto, *context]) == 0
    assert f"prefixes {why}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.exhaustive
def test_steps_without_shared_prefixes_are_those_with_them(tiny, tmp_path, metrics_of):
    config = run_of(tiny, tmp_path, "fp32")
    (tmp_path / "run.yaml").write_text(dump_config(config))
    typed = [str(tmp_path / "run.yaml"), "batch.max_steps=2", "device=cpu"]
    context = ["gpus=[0,1]", "context.parallel=2"]
    auto, why = "batch.share_prefix=auto", "not shared: with context.parallel, ranks share each sample's tokens"
    assert main(["train", *typed, auto, *context, f"run_dir={tmp_path / 'context'}"]) == 0
    assert re.search(rf"(?m) prefixes +{why}$", (tmp_path / "context" / "train.log").read_text())
    # the same steps share prefixes without it
    assert main(["train", *typed, auto]) == 0
    alone, together = metrics_of(config.folder), metrics_of(tmp_path / "context")
    assert min(each["shared_share"] for each in alone) > 0.1
    assert [each["shared_share"] for each in together] == [0, 0]
    assert [each["loss"] for each in together] == pytest.approx([each["loss"] for each in alone], rel=1e-5)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_every_cut_and_strategy_agrees_with_samples_alone(tiny, tmp_path, num_ranks):
    config = run_of(tiny, tmp_path, "fp32")
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert main(["verify", str(tmp_path / "run.yaml"), "--ranks", str(num_ranks)]) == 0
    rows = {row["case"]: row for row in json.loads((config.folder / "verify.json").read_text())["rows"]}
    over_ranks = ("ddp", "zero1", "zero2", "zero3", "fsdp") if num_ranks == 2 else ()
    assert {"packed", "each sample alone", *over_ranks} <= rows.keys()
    assert max(row["worst_difference"] for row in rows.values()) < 1e-4
