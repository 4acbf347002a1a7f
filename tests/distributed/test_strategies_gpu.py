"""Every strategy over 2 and 4 GPUs (NCCL) equals one GPU: `pytest -m gpu tests/distributed/test_strategies_gpu.py`."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from strategies import run_cases
from test_strategies import Cases, assert_close, values

pytestmark = pytest.mark.gpu
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
# sums in another order: fp32 kernels on a GPU round as often as the CPU's (two H200s: loss 9e-8, norm 3e-7, gradients
# 6e-7, weights 6e-7), bf16 products in every layer
LIMITS = {
    "fp32": {"loss": 1e-6, "norm": 1e-5, "grads": 1e-5, "weights": 1e-4, "eval": 1e-6, "answers": 0.0},
    "bf16": {"loss": 5e-3, "norm": 5e-2, "grads": 1e-1, "weights": 2e-1, "eval": 5e-3},
}


def run_near_one(
    cases: Cases, num_ranks: int, limits_of: dict[str, dict[str, float]] = LIMITS
) -> dict[str, dict[str, Any]]:
    """All cases over so many GPUs, each within its precision's limits of one GPU; the differences are printed."""
    report = run_cases(cases.cases, cases.folder, num_ranks, 600)
    for entry in report.values():
        print(entry)
    for precision, limits in limits_of.items():
        assert_close(report, precision, limits)
    return report


def add_fp8(cases: Cases, folder: Path) -> None:
    """fp8 products in the two inner layers of four, compiled, beside one GPU with the same ones."""
    if importlib.util.find_spec("torchao") is None or torch.cuda.get_device_capability() < (8, 9):
        return
    shutil.copytree(cases.tiny.model_dir, folder / "deeper")
    shape = json.loads((folder / "deeper" / "config.json").read_text())
    shape |= {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    (folder / "deeper" / "config.json").write_text(json.dumps(shape))
    model = {"name": str(folder / "deeper"), "init": "random"}
    for compute, scales in (("fp8", "tensor"), ("fp8_rowwise", "row")):
        for strategy, optimizer in (("zero1", "adamw"), ("fsdp", "adamw"), ("fsdp", "adamw8bit")):
            sections = {"model": model, "full": {"compute": compute}, "optim": {"name": optimizer}, "device": "cuda"}
            given = values(cases.tiny, "full", "bf16", strategy=strategy, **sections)
            cases.add(f"{scales} scales {strategy} {optimizer}", 4, given)


def add_plain(cases: Cases, precision: str, method: str, num_ranks: int) -> None:
    """Each strategy, and steps in which ranks differ, eagerly."""
    gpu = {"device": "cuda", "compile": "off"}
    for strategy in STRATEGIES:
        if strategy == "hsdp" and num_ranks < 4:
            continue
        sharding = {"replicas": 2} if strategy == "hsdp" else {}
        given = values(cases.tiny, method, precision, strategy=strategy, sharding=sharding, **gpu)
        cases.add(f"{precision} {method} {strategy}", 20, given)
    given = values(cases.tiny, method, precision, strategy="zero3", **gpu)
    for kind in ("masked", "stopped", "poisoned"):
        cases.add(f"{precision} {method} zero3 {kind}", 1, given, kind=kind)
    if method == "full":
        offload = {"offload": True, "prefetch": 2}
        cases.add(f"{precision} full zero3 offload", 4, {**given, "sharding": offload})


def require_gpus(num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("precision", LIMITS)
def test_gpus_equal_one(tiny, tmp_path, precision, method, num_ranks):
    require_gpus(num_ranks)
    cases = Cases(tiny, tmp_path)
    add_plain(cases, precision, method, num_ranks)
    run_near_one(cases, num_ranks, {precision: LIMITS[precision]})


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gpus_that_compile_and_quantize_equal_one(tiny, tmp_path, num_ranks):
    require_gpus(num_ranks)
    cases = Cases(tiny, tmp_path)
    compiled = values(tiny, "full", "bf16", strategy="zero3", device="cuda")
    cases.add("bf16 full zero3 compiled", 4, compiled, like={**compiled, "compile": "off"})
    for compile_mode in ("off", "auto"):
        four_bit = {"base": {"storage": "nf4"}, "device": "cuda", "compile": compile_mode}
        given = values(tiny, "lora", "bf16", strategy="zero3", **four_bit)
        cases.add(f"bf16 lora zero3 nf4 compile {compile_mode}", 4, given, like={**given, "compile": "off"})
    add_fp8(cases, tmp_path)
    report = run_near_one(cases, num_ranks, {"bf16": LIMITS["bf16"]})
    # rows have the same scales in any micro-batch; a tensor's scale follows the samples beside
    assert_close(report, "row scales", LIMITS["bf16"])
    assert_close(report, "tensor scales", {"loss": 1e-2, "norm": 1e-1, "eval": 1e-2})
    assert report["bf16 lora zero3 nf4 compile auto"]["held"] == pytest.approx(1 / num_ranks, rel=0.1)
