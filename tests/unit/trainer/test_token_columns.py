"""Log-probabilities of tokens as a column: of the policy and its reference, however a step is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from unit_store import write_groups

from flatout.checkpoint.write import Checkpoints
from flatout.cli.main import main
from flatout.config.objective import REFERENCE_TOKENS
from flatout.config.read import dump_config, make_config
from flatout.errors import UsageError
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.trainer.build import build_run
from flatout.trainer.passes import as_in_training
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.reference_logprobs import compute_token_column, reference_weights
from flatout.trainer.state import Setup, TrainingRun

TEMPERATURE = 0.7
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"share_prefix": "off"},
    "shared": {"share_prefix": "on"},
    "shared, many passes": {"share_prefix": "on", "micro_batch_tokens": 200},
    "rows": {"layout": "rows", "micro_batch_tokens": 600},
}


@pytest.fixture(scope="module")
def groups(tiny, tmp_path_factory):
    """The root of a data set of sampled answers without a reference, and what the plain model says of its tokens."""
    root = tmp_path_factory.mktemp("groups")
    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir, dtype=torch.float64)
    store = write_groups(root, model, tiny.model_dir, [4, 2, 3, 4], name="groups", lacks=[REFERENCE_TOKENS])
    truth = np.zeros(len(store.token_ids))
    for index, start in enumerate(store.offsets[:-1].tolist()):
        ids, mask = (torch.tensor(part.tolist()) for part in store.sample(index).pair)
        with torch.no_grad():
            logprobs = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        truth[start + 1 : start + len(ids)] = (logprobs * mask[1:]).numpy()
    return root, truth


def config_of(tiny: Any, root: Any, folder: Any, batch: Any, **more: Any) -> Any:
    return make_config(
        {
            "run_dir": str(folder),
            "device": "cpu",
            "model": {"name": str(tiny.model_dir), "precision": "fp64"},
            "data": {"name": "groups", "root": str(root)},
            "objective": {"kind": "dapo", "kl": 0.1, "temperature": TEMPERATURE},
            "eval": {"prompts": []},
            "optim": {"lr": 1e-2},
            "batch": {"samples_per_step": 2, "max_steps": 2, "micro_batch_tokens": 4000, **batch},
            **more,
        }
    )


def built(config: Any) -> TrainingRun:
    planned = open_and_plan(config, Reporter(), Rank())
    checkpoints = Checkpoints(config.folder, keep=1, on_event=lambda kind, facts: None)
    return build_run(Setup(config, planned, checkpoints, Reporter(), Rank()))


def column_of(run: TrainingRun) -> Any:
    with as_in_training(run):
        return compute_token_column(run, run.loader, run.plan, list(run.plan.steps()), temperature=TEMPERATURE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_column_is_that_of_the_plain_model_and_the_reference_outlives_updates(tiny, groups, tmp_path, layout):
    root, truth = groups
    run = built(config_of(tiny, root, tmp_path / "run", LAYOUTS[layout], lora={"rank": 4}))
    store, step = run.loader.store, run.plan.step(0)
    assert any(one.shared for one in step.micro_batches) == layout.startswith("shared")
    assert len(step.by_rank[0]) > 1 or run.plan.batch_layout.micro_batch_tokens > 1000
    found = store.extra[REFERENCE_TOKENS]
    # rotary cosines are computed in fp32
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, truth, rtol=1e-5, atol=1e-5)
    assert (found[truth == 0] == 0).all()
    assert np.array_equal(column_of(run), found)
    for parameter in run.parameters:
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    run.progress.num_updates = 1
    policy = column_of(run)
    assert np.abs(policy - found).max() > 0.01
    with reference_weights(run):
        assert np.array_equal(column_of(run), found)
    assert np.array_equal(column_of(run), policy)
    run.close()


def test_a_run_that_trains_all_weights_has_a_reference_before_its_first_update_only(tiny, groups, tmp_path):
    root, truth = groups
    run = built(config_of(tiny, root, tmp_path / "run", {}, method="full"))
    np.testing.assert_allclose(run.loader.store.extra[REFERENCE_TOKENS], truth, rtol=1e-5, atol=1e-5)
    with reference_weights(run):
        np.testing.assert_allclose(column_of(run), truth, rtol=1e-5, atol=1e-5)
    run.progress.num_updates = 1
    with pytest.raises(UsageError, match="method full"), reference_weights(run):
        pass
    run.close()


@pytest.mark.parametrize("more", [["two", "context"], pytest.param(["zero3"], marks=pytest.mark.exhaustive)])
def test_ranks_and_shards_of_a_context_train_to_the_same_reference(tiny, groups, tmp_path, metrics_of, more):
    forms: dict[str, list[str]] = {
        "one": [],
        "two": ["gpus=[0,1]"],
        "zero3": ["gpus=[0,1]", "strategy=zero3"],
        "context": ["gpus=[0,1]", "context.parallel=2", "batch.share_prefix=off"],
    }
    config = config_of(tiny, groups[0], tmp_path / "run", {"micro_batch_tokens": 500}, lora={"rank": 4})
    (tmp_path / "run.yaml").write_text(dump_config(config, only_given=True))
    found = {}
    for name in ("one", *more):
        assert main(["train", str(tmp_path / "run.yaml"), f"run_dir={tmp_path / name}", *forms[name]]) == 0
        found[name] = [one["metrics"]["kl/reference"] for one in metrics_of(tmp_path / name)]
    assert abs(found["one"][0]) < 1e-9 < found["one"][1]
    for name, values in found.items():
        assert values == pytest.approx(found["one"], rel=1e-5, abs=1e-9), name
