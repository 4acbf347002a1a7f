"""On a CUDA GPU: rows equal packed documents in bf16 with compiled layers, and steps neither compile nor wait."""

from pathlib import Path
from typing import Any

import pytest
import torch
from built_run import built_run
from tiny_models import save_tiny_model

from flatout.models.compile.layers import report_compilations
from flatout.trainer.state import TrainingRun
from flatout.trainer.step import accumulate_gradients

pytestmark = pytest.mark.gpu
WARM_UP_STEPS = 3


def build(tiny: Any, folder: Path, layout: str, attention: str, **sections: Any) -> TrainingRun:
    shape = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "vocab_size": 512}
    save_tiny_model(folder / "model", "qwen3", **shape)
    for file in (*tiny.model_dir.glob("*token*"), *tiny.model_dir.glob("chat_template*")):
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    config = tiny.config(
        folder / layout,
        device="cuda",
        model={"name": str(folder / "model"), "precision": "bf16", "attention": attention},
        batch={"samples_per_step": 12, "micro_batch_tokens": 4000, "max_steps": 12, "layout": layout},
        **sections,
    )
    return built_run(config)


def gradient(run: TrainingRun, step: int) -> torch.Tensor:
    run.optimizer.zero_grad(set_to_none=True)
    accumulate_gradients(run, run.plan.step(step))
    grads = [parameter.grad.double().flatten() for parameter in run.named_parameters.values()]
    return torch.cat(grads)


@pytest.mark.parametrize("attention", ["auto", "varlen"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_rows_equal_packed(tiny, tmp_path, method, attention):
    found = []
    for layout in ("packed", "rows"):
        torch._dynamo.reset()
        run = build(tiny, tmp_path, layout, attention, method=method)
        found.append([gradient(run, step) for step in range(3)])
        run.loader.close()
    for packed, rows in zip(*found, strict=True):
        assert torch.nn.functional.cosine_similarity(packed, rows, dim=0) > 0.995
        assert rows.norm().item() == pytest.approx(packed.norm().item(), rel=0.02)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_steady_steps_compile_nothing_and_never_wait(tiny, tmp_path, method):
    torch._dynamo.reset()
    run = build(tiny, tmp_path, "rows", "auto", method=method)
    compiled: list[float] = []
    sizes = set()
    with report_compilations(compiled.append):
        for index, step in enumerate(run.loader.prefetching(run.plan.steps(), 0)):
            run.optimizer.zero_grad(set_to_none=True)
            sizes |= {(len(batch.sample_ids), batch.row_length) for batch in step.by_rank[0]}
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("default" if index < WARM_UP_STEPS else "error")
            try:
                accumulate_gradients(run, step)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    run.loader.close()
    assert not compiled
    assert len(sizes) > 12, "one row and several, of many lengths"
    assert min(count for count, _ in sizes) == 1 < max(count for count, _ in sizes)
