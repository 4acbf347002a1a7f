"""Steady steps over answers: they neither compile nor wait for the device, and no pass is larger than the plan's.

On a CUDA GPU the compiler and torch's own debug mode are asked. On a CPU, operators that a GPU's host would wait for.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from built_run import built_run
from test_syncs_gpu import WARM_UP_STEPS, sync_debug
from tiny_models import save_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from unit_store import write_units

from flatout.config.objective import REFERENCE
from flatout.config.read import make_config
from flatout.config.schema import Config
from flatout.models.compile.layers import report_compilations
from flatout.parallel.rank import Rank
from flatout.planner.devices import GIB, Device
from flatout.planner.memory.sizes import MicroBatchSize
from flatout.track.callback import Reporter
from flatout.trainer.passes import as_in_training, compute_logprobs
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.state import TrainingRun
from flatout.trainer.step import accumulate_gradients, launch_step

KINDS = ["dpo", "kto", "reward"]
# their result's size, or their value, is known to the device only
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}


class HostReads(TorchDispatchMode):
    """Notes operators for which the host of a GPU would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        if name in WAITS or by_mask or (name == "repeat_interleave" and not (kwargs or {}).get("output_size")):
            callers = traceback.extract_stack(limit=12)
            # what takes the place of a GPU's attention kernel reads where documents begin
            if not any(frame.filename.endswith("attention/reference.py") for frame in callers):
                self.found.append(name)
        return func(*args, **(kwargs or {}))


def config_of(tiny: Any, folder: Path, kind: str, device: str, **sections: Any) -> Config:
    """A run over units of random answers, on a model that compiles."""
    model = folder / "model"
    save_tiny_model(model, "qwen3", hidden_size=256, head_dim=64, intermediate_size=384, vocab_size=512)
    for file in (*tiny.model_dir.glob("*token*"), *tiny.model_dir.glob("chat_template*")):
        (model / file.name).write_bytes(file.read_bytes())
    labels = [1, 0] * 24 if kind == "kto" else None
    write_units(folder, model, [1] * 48 if labels else [2] * 24, name="d", labels=labels)
    values = {
        "run_dir": str(folder / "run"),
        "device": device,
        "model": {"name": str(model), "precision": "bf16" if device == "cuda" else "fp32"},
        "data": {"name": "d", "root": str(folder)},
        "objective": kind,
        "lora": {"rank": 8},
        "batch": {"samples_per_step": 12 if labels else 6, "micro_batch_tokens": 700, "max_steps": 12},
        "eval": {"prompts": []},
    }
    return make_config(values | sections)


def built(config: Config) -> TrainingRun:
    torch._dynamo.reset()
    return built_run(config)


@pytest.mark.parametrize("kind", KINDS)
def test_no_operator_of_a_step_waits_for_a_value(tiny, tmp_path, kind):
    run = built(config_of(tiny, tmp_path, kind, "cpu"))
    accumulate_gradients(run, run.plan.step(0))
    with HostReads() as reads:
        sums = accumulate_gradients(run, run.plan.step(1))
        assert not reads.found
        # so that this test can fail
        _ = sums[0].item(), sums[sums > 0], sums.nonzero()
    assert reads.found == ["_local_scalar_dense", "index", "nonzero"]
    run.close()


def test_log_probabilities_of_tokens_add_up_to_those_of_samples(tiny, tmp_path):
    run = built(config_of(tiny, tmp_path, "dpo", "cpu"))
    step, store = run.plan.step(0), run.loader.store
    ids = sorted(step.sample_ids)
    with as_in_training(run):
        of_tokens = compute_logprobs(run, run.loader, run.plan, step, ids, per="token")
        of_samples = compute_logprobs(run, run.loader, run.plan, step, ids)
    lengths = store.lengths[ids]
    assert len(of_tokens) == lengths.sum()
    assert (of_tokens < 0).sum() == store.num_label_tokens[ids].sum()
    assert np.allclose(np.add.reduceat(of_tokens, np.cumsum(lengths) - lengths), of_samples, rtol=1e-6)
    # the reference, which is this model, was computed by the same pass
    assert (store.extra[REFERENCE][ids] == of_samples).all()
    run.close()


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_every_pass_is_within_what_memory_is_planned_for(tiny, tmp_path, kind):
    """Those before a step too, of other samples: a GPU has memory for no larger ones."""
    batch = {"samples_per_step": 12, "max_steps": 3}
    config = config_of(tiny, tmp_path, kind, "cpu", batch=batch)
    whole = open_and_plan(config, Reporter(), Rank(), Device("a GPU", 60 * GIB))
    (largest,) = whole.plan.step(0).by_rank[0]
    need = whole.memory.estimate(MicroBatchSize(largest.num_tokens, largest.num_label_tokens, 12))
    assert need is not None
    room = need.state_bytes + need.working_bytes + 0.6 * need.activations_bytes
    config = config.model_copy(update={"memory": room / 0.94 / GIB})
    planned = open_and_plan(config, Reporter(), Rank(), Device("a GPU", 60 * GIB))
    assert (planned.kl_pairs is not None) == (kind == "kto")
    for plan in (planned.plan, *([] if planned.kl_pairs is None else [planned.kl_pairs.plan])):
        passes = [batch for step in plan.steps() for batch in step.by_rank[0]]
        assert max(batch.num_padded_tokens for batch in passes) <= planned.memory.micro_batch_tokens
        assert len(passes) > plan.num_steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuda_graphs", ["auto", "off"])
@pytest.mark.gpu
def test_a_steady_step_neither_compiles_nor_waits(tiny, tmp_path, kind, cuda_graphs):
    run, before = built(config_of(tiny, tmp_path, kind, "cuda", cuda_graphs=cuda_graphs)), None
    compiled_s: list[float] = []
    for index, step in enumerate(run.loader.prefetching(run.plan.steps(), run.rank.index)):
        is_steady = index >= WARM_UP_STEPS
        with sync_debug("error" if is_steady else "default"), report_compilations(compiled_s.append):
            pending = launch_step(run, step)
            outcome = before() if before is not None else None
        assert before is None or (outcome is not None and outcome.grad_norm > 0)
        if not is_steady:
            compiled_s.clear()
        before = pending
    assert not compiled_s
    run.close()
