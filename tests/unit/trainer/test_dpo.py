"""examples/dpo.py as a person runs it, against plain transformers in fp64, however the step is split."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.data.columns import Column
from flatout.data.store_writer import new_store
from flatout.data.token_store import TokenStore
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.trainer.planned_run import open_and_plan

DPO = Path(__file__).parents[3] / "examples" / "dpo.py"
NUM_PAIRS, PREFIX, BETA = 12, 70, 0.2


@pytest.fixture(scope="module")
def pairs(tiny, tmp_path_factory):
    """The root of a data set of pairs whose answers follow a prompt in common, with a reference's log-probabilities."""
    root = tmp_path_factory.mktemp("pairs")
    built = open_and_plan(tiny.config(root / "run"), Reporter(), Rank()).store
    shutil.copytree(tiny.root / "data", root / "data")
    folder = root / "data" / built.folder.relative_to(tiny.root / "data")
    shutil.rmtree(folder)
    rng, ids, masks = np.random.default_rng(0), [], []
    for _ in range(NUM_PAIRS):
        prompt = rng.integers(5, 250, PREFIX)
        for _ in range(2):
            answer = rng.integers(5, 250, int(rng.integers(4, 30)))
            ids.append(np.concatenate([prompt, answer]).astype(np.int32))
            masks.append(np.arange(len(ids[-1])) >= PREFIX)
    lengths, count = np.array([len(own) for own in ids]), 2 * NUM_PAIRS
    columns = {
        "ref_logprob": Column("float64", "sample", "log-probability by the reference"),
        "prefix_tokens": Column("int32", "unit", "tokens in common"),
    }
    values: dict[str, Any] = {
        "ref_logprob": rng.normal(-60.0, 20.0, count),
        # the last one stays outside, as it predicts the first label
        "prefix_tokens": np.full(NUM_PAIRS, PREFIX - 1, np.int32),
    }
    with new_store(folder, 300, columns=columns) as writer:
        writer.append(
            np.concatenate(ids), np.concatenate(masks), lengths, np.zeros(count, np.int32), np.arange(1, count + 1),
            np.full(NUM_PAIRS, 2), values,
        )  # fmt: skip
        facts = replace(built.meta, fingerprint="d" * 32, max_token_id=int(np.concatenate(ids).max()))
        writer.finish(facts, {"counts": {}})
    return root / "data"


def written(tiny: Any, pairs: Path, folder: Path, **sections: Any) -> Path:
    """run.yaml of a run on the pairs, without the loss, which is named on the command line."""
    batch = {"samples_per_step": 6, "max_steps": 1, "micro_batch_tokens": 4000, **sections.pop("batch", {})}
    config = tiny.config(
        folder / "run",
        method="full",
        model={"name": str(tiny.model_dir), "precision": "fp64"},
        data={"root": str(pairs), "sources": []},
        batch=batch,
        optim={"lr": 1e-3, "max_grad_norm": None},
        **sections,
    )
    folder.mkdir(exist_ok=True)
    shutil.copy(DPO, folder / "dpo.py")
    (folder / "run.yaml").write_text(dump_config(config, only_given=True))
    return folder / "run.yaml"


def options(file: Path) -> list[str]:
    return [str(file), f"objective.path={file.with_name('dpo.py')}:DPO", f"objective.beta={BETA}"]


@pytest.fixture(scope="module")
def plain(tiny, pairs, tmp_path_factory):
    """Loss, gradient norm and figures of the first step: each document alone in plain transformers."""
    folder = tmp_path_factory.mktemp("plain")
    written(tiny, pairs, folder)
    from flatout.config.read import load_config

    config = load_config(folder / "run.yaml")
    planned = open_and_plan(config, Reporter(), Rank())
    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir, dtype=torch.float64)
    store: TokenStore = planned.store
    margins, total = [], torch.zeros((), dtype=torch.float64)
    units = sorted({sample_id // 2 for sample_id in planned.plan.step(0).sample_ids})
    assert len(units) == 6
    for unit in units:
        ratios = []
        for sample_id in (2 * unit, 2 * unit + 1):
            ids, mask = (torch.tensor(part.tolist()) for part in store.sample(sample_id).pair)
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            ratios.append(logprobs[mask[1:]].sum() - float(store.extra["ref_logprob"][sample_id]))
        margin = BETA * (ratios[0] - ratios[1])
        margins.append(margin.item())
        total = total - logsigmoid(margin)
    (total / len(units)).backward()
    norm = torch.stack([own.grad.norm() for own in model.parameters() if own.grad is not None]).norm()
    return {
        "loss": total.item() / len(units),
        "grad_norm": norm.item(),
        "rewards/accuracies": sum(margin > 0 for margin in margins) / len(units),
        "rewards/margins": sum(margins) / len(units),
    }


RUNS: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "several micro-batches": ({"micro_batch_tokens": 420, "share_prefix": "off"}, [], 3),
    "shared prompts, several": ({"micro_batch_tokens": 250}, [], 3),
    "two ranks": ({"micro_batch_tokens": 250}, ["gpus=[0,1]", "device=cpu"], 2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if name == "two ranks" else []) for name in RUNS]
)
def test_a_step_is_that_of_plain_transformers(tiny, pairs, plain, tmp_path, metrics_of, name):
    batch, more, least = RUNS[name]
    assert main(["train", *options(written(tiny, pairs, tmp_path, batch=batch)), *more]) == 0
    (line,) = metrics_of(tmp_path / "run")
    assert line["num_micro_batches"] >= least
    assert (line["shared_share"] > 0.3) == ("share_prefix" not in batch and batch.get("layout") != "rows")
    found = {**line["metrics"], "loss": line["loss"], "grad_norm": line["grad_norm"]}
    assert {key: found[key] for key in ("loss", *plain)} == pytest.approx(plain, rel=1e-6)
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-9)


@pytest.mark.parametrize(
    ("ranks", "is_sum"), [(1, False), *(pytest.param(ranks, True, marks=pytest.mark.exhaustive) for ranks in (1, 2))]
)
def test_verify_proves_it_and_finds_a_wrong_one(tiny, pairs, tmp_path, ranks, is_sum):
    file = written(tiny, pairs, tmp_path)
    if not is_sum:  # a loss that depends on how a step is split
        text = DPO.read_text().replace("-logsigmoid(margins).sum()", "-logsigmoid(margins).sum() * len(margins)")
        file.with_name("dpo.py").write_text(text)
    assert main(["verify", *options(file), "--ranks", str(ranks)]) == (0 if is_sum else 5)
