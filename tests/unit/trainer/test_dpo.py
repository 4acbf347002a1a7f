"""examples/dpo.py as a person runs it, against plain transformers in fp64, however the step is split."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_losses import PlainStep
from unit_store import write_units

from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.trainer.planned_run import open_and_plan
from tests.usual import usual

DPO = Path(__file__).parents[3] / "examples" / "dpo.py"


@pytest.fixture(scope="module")
def pairs(tiny, tmp_path_factory):
    """The root of a data set of pairs with a reference's log-probabilities; every second pair shares its prompt."""
    root = tmp_path_factory.mktemp("pairs")
    write_units(root, tiny.model_dir, [2] * 12, name="pairs")
    return root


def config_of(tiny: Any, pairs: Path, folder: Path, **batch: Any) -> Any:
    return tiny.config(
        folder / "run",
        method="full",
        model={"precision": "fp64"},
        data={"name": "pairs", "root": str(pairs), "sources": []},
        batch={"samples_per_step": 6, "max_steps": 1, "micro_batch_tokens": 4000, **batch},
        optim={"max_grad_norm": None},
    )


def typed(config: Any, folder: Path) -> list[str]:
    """run.yaml without the loss, which is named on the command line, and the loss beside it."""
    (folder / "run.yaml").write_text(dump_config(config, only_given=True))
    shutil.copy(DPO, folder / "dpo.py")
    return [str(folder / "run.yaml"), f"objective.path={folder / 'dpo.py'}:DPO", "objective.beta=0.1"]


RUNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "several micro-batches": ({"micro_batch_tokens": 260, "share_prefix": "off"}, []),
    "shared prompts, several": ({"micro_batch_tokens": 200}, []),
    "two ranks": ({"micro_batch_tokens": 200}, ["gpus=[0,1]", "device=cpu"]),
}


@pytest.mark.parametrize("name", usual(RUNS, list(RUNS)[:2]))
def test_a_step_is_that_of_plain_transformers(tiny, pairs, tmp_path, metrics_of, name):
    batch, more = RUNS[name]
    config = config_of(tiny, pairs, tmp_path, **batch)
    planned = open_and_plan(config, Reporter(), Rank())
    store, step = planned.store, planned.plan.step(0)
    loss, gradients, metrics = PlainStep(
        tiny.model_dir, store, step.sample_ids, store.extra["ref_logprob"].tolist()
    ).gradients("dpo")
    assert main(["train", *typed(config, tmp_path), *more]) == 0
    (line,) = metrics_of(tmp_path / "run")
    assert line["num_micro_batches"] >= 2
    assert (line["shared_share"] > 0.1) == ("share_prefix" not in batch)
    assert line["loss"] == pytest.approx(loss, rel=1e-9)
    norm = torch.stack([one.norm() for one in gradients.values()]).norm().item()
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert line["metrics"] == pytest.approx({name: metrics[name] for name in line["metrics"]}, rel=1e-6)


@pytest.mark.parametrize(("ranks", "is_sum"), usual([(1, False), (1, True), (2, True)], [(1, False)]))
def test_verify_proves_it_and_finds_a_wrong_one(tiny, pairs, tmp_path, ranks, is_sum):
    words = typed(config_of(tiny, pairs, tmp_path), tmp_path)
    if not is_sum:  # a loss that depends on how a step is split
        text = DPO.read_text().replace("-logsigmoid(margins).sum()", "-logsigmoid(margins).sum() * len(margins)")
        (tmp_path / "dpo.py").write_text(text)
    assert main(["verify", *words, "--ranks", str(ranks)]) == (0 if is_sum else 5)
