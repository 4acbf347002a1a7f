"""Experts shared by 2 and 4 gloo ranks equal one process: loss, norm, every gradient, weights, evaluation, answers."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from flatout.config.read import make_config
from flatout.errors import FlatoutError
from flatout.parallel.rank import Rank
from flatout.planner.devices import DEVICES
from flatout.planner.memory.sizes import MicroBatchSize
from flatout.track.callback import MemoryCallback, Reporter
from flatout.trainer.model_shape import read_shape
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.run import train

sys.path.insert(0, str(Path(__file__).parent))

from launching import DEADLINE_S
from strategies import run_cases
from test_checkpoint_runs import WEIGHTS, keep_only
from test_gloo import finish, start
from test_strategies import EXACT, Cases, assert_close, values

SIZES = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN = {"num_experts": 8, "moe_intermediate_size": 24}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", QWEN),
    # biases, interleaved gates, transposed weights
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "layer_types": ["full_attention"] * 2}),
    "skewed": ("qwen3_moe", QWEN),
    "wide": ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 64, "hidden_size": 128, "num_hidden_layers": 1}),
}


@pytest.fixture(scope="session")
def models(tiny, tmp_path_factory):
    """Folders of tiny models by type; those named `skewed` send every token to the first experts."""
    folder = tmp_path_factory.mktemp("experts")
    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    found = {}
    for name, (kind, own) in KINDS.items():
        ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": 2048}
        config = CONFIG_MAPPING[kind](**{**SIZES, **ids, **own})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.2)
                if name == "skewed" and parameter.shape == (8, 32):
                    # the states' first element is positive
                    parameter.zero_()
                    parameter[:2, 0] = torch.tensor([40.0, 30.0])
        found[name] = str(folder / name)
        model.save_pretrained(folder / name)
    return found


def shared(tiny: Any, method: str, folder: str, num_ranks: int, precision: str = "fp64", **sections: Any) -> Any:
    """Settings of a run whose experts are shared by so many ranks, and of one process."""
    model = {"name": folder, **sections.pop("model", {})}
    sections.setdefault("data", {"tokenizer": str(tiny.model_dir)})
    losses = sections.pop("experts", {})
    if method == "lora":
        sections.setdefault("lora", {"targets": ["q_proj", "experts"]})
    given = values(tiny, method, precision, model=model, experts={**losses, "parallel": num_ranks}, **sections)
    return given, {**given, "experts": losses}


def add(cases: Cases, name: str, num_steps: int, pair: Any, kind: str = "steps") -> None:
    cases.add(name, num_steps, pair[0], like=pair[1], kind=kind)


ALL_CASES = [pytest.param(num_ranks, True, marks=pytest.mark.exhaustive, id=f"{num_ranks} all") for num_ranks in (2, 4)]


def add_further(cases: Cases, models: dict[str, str], num_ranks: int) -> None:
    """Every method with every strategy and kind of step, quantized bases, and a router that chooses two experts."""
    for method in ("lora", "full"):
        for strategy in ("ddp", "zero3"):
            pair = shared(cases.tiny, method, models["qwen3_moe"], 2, strategy=strategy)
            add(cases, f"fp64 {method} {strategy} again", 4, pair)
        pair = shared(cases.tiny, method, models["gpt_oss"], num_ranks, strategy="ddp")
        # the other ranks' passes have no label, then a rank is asked to stop, then a weight is not a number
        for kind in ("masked", "stopped", "poisoned"):
            add(cases, f"fp64 {method} {kind}", 1, pair, kind=kind)
        add(cases, f"fp64 {method} skewed", 2, shared(cases.tiny, method, models["skewed"], 2, strategy="ddp"))
    for storage in ("fp8", "nf4"):
        for strategy in ("ddp", "zero3"):
            sections = {"base": {"storage": storage}, "strategy": strategy}
            pair = shared(cases.tiny, "lora", models["wide"], 2, "fp32", **sections)
            add(cases, f"{storage} fp32 {strategy} again", 2, pair)


@pytest.mark.parametrize(("num_ranks", "further"), [pytest.param(2, False, id="2"), *ALL_CASES])
def test_ranks_equal_one(tiny, models, tmp_path, num_ranks, further):
    cases = Cases(tiny, tmp_path)
    balance = {"experts": {"balance_loss": 0.5, "z_loss": 0.01}}
    add(cases, "fp64 lora ddp", 3, shared(tiny, "lora", models["qwen3_moe"], 2, strategy="ddp"))
    add(cases, "fp64 full zero3", 2, shared(tiny, "full", models["qwen3_moe"], 2, strategy="zero3", **balance))
    add(cases, "fp64 full gpt_oss", 2, shared(tiny, "full", models["gpt_oss"], num_ranks, strategy="ddp"))
    sections = {"strategy": "zero1", "recompute": "full"}
    add(cases, "fp64 full zero1 recompute", 2, shared(tiny, "full", models["skewed"], 2, **sections))
    # 16,384 values a matrix and rank, which blocks of nf4 fill
    sections = {"base": {"storage": "nf4"}, "strategy": "ddp"}
    add(cases, "nf4 fp32 ddp", 2, shared(tiny, "lora", models["wide"], 2, "fp32", **sections))
    if further:
        add_further(cases, models, num_ranks)
    report = run_cases(cases.cases, cases.folder, num_ranks, DEADLINE_S)
    assert_close(report, "fp64", EXACT)
    assert_close(report, "nf4", {"loss": 1e-6, "norm": 1e-6, "grads": 1e-6, "weights": 1e-4})
    if further:
        # a last bit of difference before quantizing to float8 may move a value by a sixteenth
        assert_close(report, "fp8", {"loss": 1e-6, "norm": 1e-5, "grads": 1e-5, "weights": 1e-3})
    # in steps of one sample, ranks without one run along
    assert report["fp64 lora ddp"]["num_fillers"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_run_resumes_to_the_bit_and_moves_to_one_process(tiny, models, tmp_path, method):
    def config(name: str, **more: Any) -> Any:
        given, alone = shared(tiny, method, models["qwen3_moe"], 2, strategy="ddp")
        own = {"run_dir": str(tmp_path / name), "checkpoint": {"every_steps": 2, "keep": 5}}
        return make_config({**(alone if more.pop("alone", False) else given), **own, **more})

    steps = {"batch": {"samples_per_step": 5, "micro_batch_tokens": 600, "max_steps": 4}}
    train(config("one", alone=True, **steps))
    assert finish(start(config("shared", **steps), tmp_path, 2)) == [0, 0]
    said = (tmp_path / "shared/train.log").read_text()
    assert "each layer has 8, 4 of them on this rank; 2 ranks share them" in said
    for name in ("again", "back"):
        keep_only(tmp_path / "shared", tmp_path / name, 2)
    assert finish(start(config("again", **steps), tmp_path, 2)) == [0, 0]
    train(config("back", alone=True, **steps))
    weights = {
        name: load_file(tmp_path / name / "final" / WEIGHTS[method]) for name in ("one", "shared", "again", "back")
    }
    assert any("experts" in name for name in weights["one"])
    for name, tensor in weights["one"].items():
        assert torch.equal(weights["again"][name], weights["shared"][name])
        for other in ("shared", "back"):
            torch.testing.assert_close(weights[other][name], tensor, rtol=1e-9, atol=1e-11)
    assert weights["one"].keys() == weights["shared"].keys()
    files = [sorted(path.name for path in (tmp_path / name / "final").iterdir()) for name in ("one", "shared")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("num_ranks", "sections", "said"),
    [
        (3, {}, "experts.parallel: 2: it must divide the number of ranks, which is 3 (gpus, or --ranks"),
        (6, {"experts": {"parallel": 3}}, "it must divide the number of experts; model type qwen3_moe has 8"),
        (2, {"model": None}, "model type qwen3 has no experts"),
        (2, {"strategy": "deepspeed", "precision": "fp32"}, "does not work with strategy: deepspeed"),
        (2, {"precision": "fp16"}, "does not work with model.precision: fp16"),
        (2, {"optim": {"name": "adamw8bit"}}, "does not work with optim.name: adamw8bit"),
        (2, {"optim": {"name": "muon"}}, "does not work with optim.name: muon"),
        (2, {"optim": {"name": "adafactor"}}, "does not work with optim.name: adafactor"),
        (2, {"gpus": [0, 1, 2]}, "does not work with 3 gpus, which it does not divide"),
        (2, {"batch": {"layout": "rows"}}, "does not work with batch.layout: rows"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_model_is_loaded(tiny, models, num_ranks, sections, said):
    given, _ = shared(tiny, "lora", models["qwen3_moe"], 2)
    changed = {"experts": {"parallel": 2}, **sections}
    if precision := changed.pop("precision", None):
        changed["model"] = {"name": models["qwen3_moe"], "precision": precision}
    elif "model" in changed:
        changed["model"], changed["lora"] = str(tiny.model_dir), {}
    with pytest.raises(FlatoutError, match=re.escape(said)):
        open_and_plan(make_config({**given, **changed}), Reporter(), Rank(0, num_ranks))


def test_a_plan_counts_one_ranks_part_of_the_experts(tiny, models):
    shape = read_shape(models["qwen3_moe"], None)
    model = AutoModelForCausalLM.from_pretrained(models["qwen3_moe"])
    num_experts = sum(own.numel() for name, own in model.named_parameters() if ".experts." in name)
    assert shape.num_expert_weights == num_experts
    rest = shape.num_params - num_experts
    tokens = MicroBatchSize(256, num_label_tokens=100, num_documents=2)
    found = {}
    for strategy in ("ddp", "zero3"):
        for expert_ranks in (1, 2):
            given, _ = shared(tiny, "full", models["qwen3_moe"], expert_ranks, "fp32", strategy=strategy)
            config, recorder = make_config(given), MemoryCallback()
            planned = open_and_plan(config, Reporter(recorder), Rank(0, 4), DEVICES["h200"])
            says = f"; {expert_ranks} ranks share each layer's experts"
            assert (says in planned.parallel_layout.reason) is (expert_ranks > 1)
            memory = planned.memory.estimate(tokens)
            assert memory is not None
            found[strategy, expert_ranks] = memory
    # two moments in fp32 for each weight
    sizes = {key: memory.optimizer_bytes for key, memory in found.items()}
    assert sizes["ddp", 1] == 8 * (rest + num_experts)
    assert sizes["ddp", 2] == 8 * (rest + num_experts // 2)
    assert sizes["zero3", 1] == 8 * (rest + num_experts) // 4
    assert sizes["zero3", 2] == 8 * rest // 4 + 8 * num_experts // 2
    assert found["ddp", 2].weights_bytes == 4 * (rest + num_experts // 2)
    # rows for all slots of both ranks
    assert found["ddp", 2].activations_bytes > found["ddp", 1].activations_bytes
