"""Micro-batches shared by 2 and 4 GPUs equal one: `pytest -m gpu tests/distributed/test_context_parallel_gpu.py`."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from test_context_parallel import add, long_chats, models, shared
from test_strategies import Cases
from test_strategies_gpu import LIMITS, run_near_one

pytestmark = pytest.mark.gpu
__all__ = ["long_chats", "models"]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gpus_that_share_micro_batches_equal_one(
    tiny: Any, long_chats: Path, models: dict[str, str], tmp_path: Path, num_ranks: int
) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    cases = Cases(tiny, tmp_path)
    gpu = {"device": "cuda", "compile": "off"}
    for precision in LIMITS:
        for method in ("lora", "full"):
            for strategy in ("ddp", "zero3"):
                pair = shared(tiny, long_chats, method, precision=precision, strategy=strategy, **gpu)
                add(cases, f"{precision} {method} {strategy}", 8, pair)
    windows = {"name": models["windows"]}
    for num_shards in {2, num_ranks}:
        given = {"precision": "bf16", "strategy": "ddp", "recompute": "full", "model": windows}
        add(cases, f"bf16 windows {num_shards}", 4, shared(tiny, long_chats, "full", num_shards, **given, **gpu))
    for strategy in ("ddp", "zero3"):
        given = {"precision": "bf16", "strategy": strategy, "device": "cuda"}
        compiled, alone = shared(tiny, long_chats, "lora", num_ranks, **given)
        add(cases, f"bf16 lora {strategy} compiled", 8, (compiled, {**alone, "compile": "off"}))
    run_near_one(cases, num_ranks)
