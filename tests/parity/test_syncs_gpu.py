"""On a CUDA GPU: a steady-state step never makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from built_run import built_run
from tiny_models import save_tiny_model

from flatout.models.auxiliary_loss import AuxiliaryLoss
from flatout.models.compile.layers import report_compilations
from flatout.trainer.step import accumulate_gradients, launch_step

pytestmark = pytest.mark.gpu
WARM_UP_STEPS = 3


@contextmanager
def sync_debug(mode: str) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def run(tiny, tmp_path, request):
    torch._dynamo.reset()
    has_experts = request.param.startswith("experts")
    shape = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "vocab_size": 512}
    shape |= {"moe_intermediate_size": 128, "num_experts": 8} if has_experts else {}
    save_tiny_model(tmp_path / "model", "qwen3_moe" if has_experts else "qwen3", **shape)
    for file in (*tiny.model_dir.glob("*token*"), *tiny.model_dir.glob("chat_template*")):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    is_low_bit = request.param == "lean"
    adapter: dict[str, Any] = {"lora": {"rank": 8, "dropout": 0.1 if request.param == "dropout" else 0.0}}
    if has_experts:
        adapter = {"lora": {"rank": 8, "targets": ["all-linear", "experts"]}}
        adapter |= {"base": {"storage": "fp8"}} if request.param == "experts-fp8" else {}
    if request.param == "fp8-backward":
        adapter["base"] = {"backward": "fp8"}
    config = tiny.config(
        tmp_path / "run",
        method="full" if is_low_bit or request.param == "full" else "lora",
        full={"weights": "bf16" if is_low_bit else "fp32"},
        optim={"name": "adamw8bit" if is_low_bit else "adamw"},
        device="cuda",
        model={"name": str(tmp_path / "model"), "precision": "bf16"},
        **(adapter if request.param in ("lora", "dropout", "fp8-backward") or has_experts else {}),
        batch={"samples_per_step": 6, "micro_batch_tokens": 700, "max_steps": 12},
    )
    made = built_run(config)
    yield made
    made.loader.close()


@pytest.mark.parametrize("run", ["lora", "dropout", "fp8-backward", "full", "experts", "experts-fp8"], indirect=True)
def test_forward_and_backward_never_wait_nor_compile(run):
    steps = run.loader.prefetching(run.plan.steps(), run.rank.index)
    # passes beside routers are recorded, too
    assert run.loss_module.decoder is not None or type(run.aux_loss) is AuxiliaryLoss
    compiled_s: list[float] = []
    for index, step in enumerate(steps):
        run.optimizer.zero_grad(set_to_none=True)
        if index < WARM_UP_STEPS:
            accumulate_gradients(run, step)
            continue
        with sync_debug("error"), report_compilations(compiled_s.append):
            sums = accumulate_gradients(run, step)
        assert all(sum_.isfinite() for sum_ in sums)
    assert not compiled_s


def test_the_debug_mode_sees_a_wait():
    """So that the tests of this file can fail."""
    value = torch.ones((), device="cuda")
    with sync_debug("error"), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()


@pytest.mark.parametrize("run", ["lora", "dropout", "full", "lean"], indirect=True)
def test_a_step_that_follows_another_never_waits_but_for_the_one_before(run):
    """From the first forward to the update and the figures of the last step: no synchronisation at all."""
    before = None
    for index, step in enumerate(run.loader.prefetching(run.plan.steps(), run.rank.index)):
        with sync_debug("default" if index < WARM_UP_STEPS else "error"):
            pending = launch_step(run, step)
            outcome = before() if before is not None else None
        assert before is None or (outcome is not None and outcome.grad_norm > 0)
        before = pending
