"""DeepSpeed's ZeRO stages over 2 gloo ranks equal one process: loss, norm, weights; states move between strategies.

On a CPU DeepSpeed compiles an operation of its own at its first start (a minute), which later ones find.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from launching import DEADLINE_S, launch
from strategies import difference, reference, run_cases, spawn
from test_strategies import Cases, assert_close, values
from test_strategies_gpu import LIMITS, run_near_one

from flatout.trainer.run import train

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed (flatout[deepspeed])"
    ),
    pytest.mark.timeout(900),
]
RANKS = Path(__file__).with_name("deepspeed_ranks.py")


def zero(stage: int, **section: Any) -> dict[str, Any]:
    return {"strategy": "deepspeed", "deepspeed": {"zero_optimization": {"stage": stage, **section}}}


@pytest.fixture(scope="module")
def two_ranks(tiny, tmp_path_factory):
    cases = Cases(tiny, tmp_path_factory.mktemp("deepspeed"))
    cpu = {"device": "cpu"}
    for stage in (1, 2, 3):
        for method in ("lora", "full"):
            cases.add(f"fp32 {method} {stage}", 20, values(tiny, method, "fp32", **zero(stage)))
        cases.add(f"fp32 full {stage} masked", 1, values(tiny, "full", "fp32", **zero(stage)), kind="masked")
        for tokens in (250, 5000):
            given = values(tiny, "full", "fp32", **zero(stage), batch={"micro_batch_tokens": tokens})
            cases.add(f"fp32 full {stage} {tokens} tokens", 2, given, like=values(tiny, "full", "fp32"))
    cases.add("fp32 full 3 offload", 2, values(tiny, "full", "fp32", **zero(3, offload_optimizer=cpu)))
    cases.add("fp32 full 2 offload", 2, values(tiny, "full", "fp32", **zero(2, offload_optimizer=cpu)))
    cases.add("fp32 full 3 recompute", 2, values(tiny, "full", "fp32", **zero(3), recompute="full"))
    autocast = {"zero_optimization": {"stage": 3}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    for stage in (1, 2, 3):
        cases.add(f"bf16 full {stage}", 4, values(tiny, "full", "bf16", **zero(stage)))
    for stage in (1, 2):
        # the engine turns autocast off around the layers, and so must the proof of compiled ones
        given = values(tiny, "full", "bf16", **zero(stage))
        cases.add(f"bf16 full {stage} proved", 4, given, kind="proved")
    cases.add("bf16 lora 3", 4, values(tiny, "lora", "bf16", **zero(3)))
    cases.add("bf16 full autocast", 4, values(tiny, "full", "bf16", strategy="deepspeed", deepspeed=autocast))
    nf4 = values(tiny, "lora", "fp32", **zero(3), base={"storage": "nf4"})
    cases.add("nf4 fp32 3", 2, nf4)
    return run_cases(cases.cases, cases.folder, 2, 600)


def test_stages_equal_one_process(two_ranks):
    assert_close(two_ranks, "fp32", {"loss": 1e-6, "norm": 2e-6, "weights": 2e-6, "eval": 1e-6, "answers": 0.0})
    counts = [two_ranks[f"fp32 full 3{tokens}"]["num_accumulated"] for tokens in (" 5000 tokens", "", " 250 tokens")]
    assert counts == [1, 2, 4]
    assert two_ranks["fp32 full 3"]["num_fillers"] > 0


def test_bf16_is_near_one_process(two_ranks):
    assert_close(two_ranks, "bf16", {"loss": 1e-3, "norm": 1e-2, "eval": 1e-3})
    # B of an adapter starts from zero, and is little more than the signs of its gradients
    assert_close(two_ranks, "bf16 full", {"weights": 2e-2})


def test_a_quantized_base_stays_whole_and_exact(two_ranks):
    # after two steps from zero, B is little more than the signs of its gradients
    assert_close(two_ranks, "nf4", {"loss": 1e-6, "norm": 2e-6, "weights": 1e-4})


@pytest.mark.parametrize("method", ["lora", "full"])
def test_states_move_between_stages_and_strategies(tiny, tmp_path, method):
    strategies = [zero(1), zero(3), {"strategy": "ddp"}, zero(2), {"strategy": "zero3"}, zero(3)]
    given = values(tiny, method, "fp32")
    spec = {"values": given, "strategies": strategies, "num_steps": 2}
    truth = torch.load(reference(given, {"kind": "steps", "num_steps": 12}, tmp_path, "truth"), weights_only=True)
    spawn(RANKS, {**spec, "folder": str(tmp_path / "moved"), "report": str(tmp_path / "got.pt")}, tmp_path, 2, 600)
    got = torch.load(tmp_path / "got.pt", weights_only=True)
    for key, limit in {"loss": 1e-6, "norm": 2e-6, "weights": 2e-6}.items():
        assert difference(got[key], truth[key], rms=key == "weights") < limit, key
    # what is exported are these weights, under the names of other libraries
    exported = sorted(tensor.double().norm().item() for tensor in got["exported"].values())
    assert exported == pytest.approx(sorted(tensor.double().norm().item() for tensor in got["weights"].values()))


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gpus_equal_one(tiny, tmp_path, num_ranks):
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    cases = Cases(tiny, tmp_path)
    gpu = {"device": "cuda", "compile": "off"}
    for precision in LIMITS:
        for stage in (1, 2, 3):
            for method in ("lora", "full"):
                given = values(tiny, method, precision, **zero(stage), **gpu)
                cases.add(f"{precision} {method} {stage}", 20, given)
        offload = zero(3, offload_optimizer={"device": "cpu", "pin_memory": True})
        cases.add(f"{precision} full 3 offload", 4, values(tiny, "full", precision, **offload, **gpu))
    compiled = values(tiny, "full", "bf16", **zero(2), device="cuda")
    cases.add("bf16 full 2 compiled", 4, compiled, like={**compiled, "compile": "off"})
    run_near_one(cases, num_ranks)


def test_pairs_of_answers_equal_one_process(tiny, tmp_path, metrics_of):
    """An objective of many sums, its reference, and the worst pairs of an evaluation."""
    rows = [
        {"prompt": f"What is {i}?", "chosen": f"It is {i}. " * (1 + i % 3), "rejected": "No. " * (1 + i % 4)}
        for i in range(24)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"name": "pairs", "root": str(tmp_path / "data"), "sources": [{"path": str(tmp_path / "pairs.jsonl")}]}
    batch = {"samples_per_step": 4, "micro_batch_tokens": 200, "max_steps": 3}
    given = {"data": data, "batch": batch, "objective": "dpo", "eval": {"fraction": 0.2}}
    train(tiny.config(tmp_path / "alone", **given))
    process = launch(tiny.config(tmp_path / "ranks", **given, **zero(2), gpus=[0, 1]), tmp_path / "launched")
    output = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 0, output
    for alone, ranks in zip(*(metrics_of(tmp_path / name, "eval") for name in ("alone", "ranks")), strict=True):
        assert ranks["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)
        assert ranks["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-6)
        assert len(ranks["worst"]) == len(alone["worst"]) > 0
