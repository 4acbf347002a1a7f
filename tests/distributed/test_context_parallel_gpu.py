"""Micro-batches shared by 2 and 4 GPUs equal one: `pytest -m gpu tests/distributed/test_context_parallel_gpu.py`."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_context_parallel import add, long_chats, models, shared
from test_strategies import Cases
from test_strategies_gpu import LIMITS, require_gpus, run_near_one

pytestmark = pytest.mark.gpu
__all__ = ["long_chats", "models"]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("precision", LIMITS)
def test_gpus_that_share_micro_batches_equal_one(tiny, long_chats, models, tmp_path, precision, num_ranks):
    require_gpus(num_ranks)
    cases = Cases(tiny, tmp_path)
    gpu = {"device": "cuda", "compile": "off"}
    for method in ("lora", "full"):
        for strategy in ("ddp", "zero3"):
            pair = shared(tiny, long_chats, method, precision=precision, strategy=strategy, **gpu)
            add(cases, f"{precision} {method} {strategy}", 8, pair)
    if precision == "bf16":
        add_windows_and_compiled(cases, long_chats, models, num_ranks)
    run_near_one(cases, num_ranks, {precision: LIMITS[precision]})


def add_windows_and_compiled(cases: Cases, long_chats: Path, models: dict[str, str], num_ranks: int) -> None:
    for num_shards in {2, num_ranks}:
        given: dict[str, Any] = {"strategy": "ddp", "recompute": "full", "model": {"name": models["windows"]}}
        given |= {"precision": "bf16", "device": "cuda", "compile": "off"}
        add(cases, f"bf16 windows {num_shards}", 4, shared(cases.tiny, long_chats, "full", num_shards, **given))
    for strategy in ("ddp", "zero3"):
        given = {"precision": "bf16", "strategy": strategy, "device": "cuda"}
        compiled, alone = shared(cases.tiny, long_chats, "lora", num_ranks, **given)
        add(cases, f"bf16 lora {strategy} compiled", 8, (compiled, {**alone, "compile": "off"}))
