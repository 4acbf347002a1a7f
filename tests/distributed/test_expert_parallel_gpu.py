"""Experts shared by 2 and 4 GPUs (NCCL) equal one: `pytest -m gpu tests/distributed/test_expert_parallel_gpu.py`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_expert_parallel import add, models, shared
from test_strategies import Cases, assert_close
from test_strategies_gpu import LIMITS, require_gpus, run_near_one

pytestmark = pytest.mark.gpu
__all__ = ["models"]
# where two experts nearly tie, rounding to bf16 chooses another one (two H200s: loss 0.017 after 8 full updates)
NEAR = {**LIMITS, "bf16": {**LIMITS["bf16"], "loss": 3e-2}}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("precision", LIMITS)
def test_gpus_that_share_experts_equal_one(tiny, models, tmp_path, precision, num_ranks):
    require_gpus(num_ranks)
    cases = Cases(tiny, tmp_path)
    gpu = {"device": "cuda", "compile": "off"}
    for method in ("lora", "full"):
        for strategy in ("ddp", "zero3"):
            pair = shared(tiny, method, models["wide"], 2, precision, strategy=strategy, **gpu)
            add(cases, f"{precision} {method} {strategy}", 8, pair)
    again = shared(tiny, "full", models["wide"], num_ranks, precision, strategy="ddp", recompute="full", **gpu)
    add(cases, f"{precision} full ddp recompute", 4, again)
    run_near_one(cases, num_ranks, {precision: NEAR[precision]})


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gpus_that_share_compiled_and_quantized_experts_equal_one(tiny, models, tmp_path, num_ranks):
    require_gpus(num_ranks)
    cases = Cases(tiny, tmp_path)
    for strategy in ("ddp", "zero3"):
        # both compiled: compiled layers round less than eager ones, and choose other experts
        pair = shared(tiny, "lora", models["wide"], num_ranks, "bf16", strategy=strategy, device="cuda")
        add(cases, f"bf16 lora {strategy} compiled", 8, pair)
    gpu = {"strategy": "ddp", "device": "cuda", "compile": "off"}
    for storage in ("fp8", "nf4"):
        pair = shared(tiny, "lora", models["wide"], 2, "bf16", base={"storage": storage}, **gpu)
        add(cases, f"{storage} ddp", 2, pair)
    report = run_near_one(cases, num_ranks, {"bf16": NEAR["bf16"]})
    assert_close(report, "nf4", LIMITS["bf16"])
    assert_close(report, "fp8", LIMITS["bf16"])
