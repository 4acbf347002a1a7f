"""Sampling on a GPU: recorded steps equal plain ones to the bit, and log-probabilities those of the packed pass."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, save_tiny_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from flatout.config.schema import BaseConfig, LoraConfig, ModelConfig
from flatout.models.load.model import load_model
from flatout.models.lora.fused import FusedLayers, FusedLora, fuse_layers
from flatout.models.lora.layer import add_lora, lora_layers
from flatout.models.model_with_loss import next_logits
from flatout.rollout import backends
from flatout.rollout.decode import RecordedSteps
from flatout.rollout.in_process import InProcess, packed_logprobs
from flatout.rollout.sampler import Completion, SamplingParams
from flatout.rollout.sampler_model import SamplerModel

pytestmark = pytest.mark.gpu
SHAPE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "max_position_embeddings": 1024}
LENGTHS = [5, 130, 1, 64, 33, 17]
PROMPTS = [np.random.default_rng(n).integers(3, VOCAB_SIZE, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module", params=["qwen3-model", "mistral-model", "qwen3-nf4", "qwen3-fp8", "qwen3_moe-model"])
def weights(request, tmp_path_factory):
    family, _, storage = request.param.partition("-")
    if storage == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 products")
    folder: Path = tmp_path_factory.mktemp(family)
    # rounding to float8 moves large logits of a tiny model too far
    scale = {"initializer_range": 0.05} if storage == "fp8" else {}
    save_tiny_model(folder, family, **SHAPE, **scale)
    config = ModelConfig(name=str(folder), precision="bf16")
    options: dict[str, Any] = {"method": "lora", "device": torch.device("cuda"), "seed": 0}
    loaded = load_model(config, base=BaseConfig(storage=storage), **options)
    add_lora(loaded.model, LoraConfig(rank=8), seed=0)
    torch.manual_seed(0)
    for layer in lora_layers(loaded.model).values():
        for name, parameter in layer.named_parameters(recurse=False):
            if name.startswith("lora_b"):
                parameter.data.normal_(0, 0.02)
    fuse_layers(loaded.model, fp8=storage == "fp8")
    loaded.model.eval()
    told: list[str] = []
    return SamplerModel(
        pretrained=loaded.model, logits=lambda batch: next_logits(loaded.model, batch), device=torch.device("cuda"),
        tolerance=0.3 if storage == "fp8" else 0.1, max_pass_tokens=512, is_padded=False, packed_context=nullcontext,
        log=told.append,
    ), told  # fmt: skip


def sample(model: SamplerModel, params: SamplingParams, *, records: bool) -> list[list[Completion]]:
    with torch.no_grad():
        return InProcess(model, records=records).sample(PROMPTS, 4, params)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 50, "top_p": 0.9}])
def test_recorded_steps_equal_plain_ones_to_the_bit(weights, settings, monkeypatch):
    """With places that are given to others as answers end at tokens of their own."""
    monkeypatch.setattr(backends, "MAX_SLOTS", 16)
    own, told = weights
    params = SamplingParams(70, seed=3, stop_ids=frozenset(range(20, 26)), repetition_penalty=1.05, **settings)
    plain, recorded = (sample(own, params, records=records) for records in (False, True))
    assert recorded == plain
    assert not told, "nothing was given up"
    if settings:
        assert "stop" in {one.ending for group in plain for one in group}
        assert len({one.token_ids for one in plain[0]}) == 4


@pytest.mark.parametrize("autocast", [False, True])
def test_kept_steps_are_recorded_once_and_read_the_weights_of_each_call(weights, autocast, monkeypatch):
    """After training changed weights in place and used all memory that was free; `release` frees theirs."""
    own, told = weights
    if autocast:
        torch.manual_seed(0)
        shape = {**SHAPE, "vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "num_key_value_heads": 2}
        model = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=4)).to(own.device).eval()
        own = replace(own, pretrained=model, logits=lambda batch: next_logits(model, batch))
        model.set_attn_implementation(weights[0].pretrained.config._attn_implementation)
    adapted = [module for module in own.pretrained.modules() if isinstance(module, FusedLora)]
    trained = [p for p in own.pretrained.parameters() if p.requires_grad]
    made = list[Any]()

    class Counted(torch.cuda.CUDAGraph):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            made.append(None)
            return super().__new__(cls, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Counted)

    def call(sampler: InProcess, params: SamplingParams, prompts: Any = PROMPTS) -> Any:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return sampler.sample(prompts, 4, params)

    def train() -> None:
        """New weights at their addresses, copies of them made anew, and garbage in all that is free."""
        with torch.no_grad():
            for parameter in trained:
                parameter.add_(0.01 * torch.randn_like(parameter))
        FusedLayers(adapted).refresh()
        sizes = [size << 20 for size in (1, 4, 16, 64, 256)]
        garbage = [torch.full((size,), float("nan"), device=own.device) for size in sizes for _ in range(3)]
        del garbage
        torch.cuda.synchronize()

    params = SamplingParams(70, temperature=0.8, seed=3, stop_ids=frozenset(range(20, 26)))
    call(InProcess(own), params)  # kernels keep workspaces
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    sampler = InProcess(own, keeps_slots=True)
    counts = list[int]()
    for seed in range(3):
        made.clear()
        found = call(sampler, replace(params, seed=seed))
        counts.append(len(made))
        assert found == call(InProcess(own, records=False), replace(params, seed=seed))
        train()
    # autocast's copies of weights are those of one call
    assert counts[0] > 0
    assert counts[1:] == ([counts[0]] * 2 if autocast else [0, 0])
    assert torch.cuda.memory_allocated() > before + (1 << 20)
    made.clear()
    shorter = replace(params, max_new_tokens=40)
    assert len(call(sampler, shorter, PROMPTS[:2])) == 2
    if not autocast:
        assert not made, "a smaller call fits"
    sampler.release()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (8 << 20)
    assert not told


def test_garbage_with_graphs_of_its_own_does_not_stop_a_recording():
    """Python's collector may run at any allocation; freeing a graph's memory in a recording would end it."""
    told: list[str] = []
    device = torch.device("cuda")

    def leave_garbage() -> None:
        kept: dict[str, Any] = {"graph": torch.cuda.CUDAGraph()}
        with torch.cuda.graph(kept["graph"]):
            kept["memory"] = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
        kept["itself"] = kept

    total = torch.zeros((), device=device)

    def step(num_places: int) -> None:
        gc.set_threshold(1)  # the next allocations collect
        total.add_(len([[] for _ in range(2000)]) / 2000)

    steps, thresholds = RecordedSteps(step, device, told.append, records=True), gc.get_threshold()
    try:
        steps(4)
        gc.set_threshold(0)
        leave_garbage()
        for _ in range(3):
            steps(4)
    finally:
        gc.set_threshold(*thresholds)
    assert not told
    assert total.item() == 4


def test_log_probabilities_are_those_of_the_packed_pass(weights):
    own, told = weights
    found = sample(own, SamplingParams(40, temperature=1.0), records=True)
    with torch.no_grad():
        for prompt, group in zip(PROMPTS, found, strict=True):
            for one in group:
                true = packed_logprobs(own, [*prompt, *one.token_ids], len(one.token_ids)).cpu()
                # bf16 has 8 bits: rounding moves logits of this size by up to 2^-5
                assert float((true - torch.tensor(one.logprobs)).abs().median()) < own.tolerance / 2
    assert not told


def test_memory_is_freed_and_bounds_the_slots(weights, monkeypatch):
    own, told = weights
    # kernels keep workspaces
    sample(own, SamplingParams(40), records=False)
    free = backends.free_bytes(own.device)
    monkeypatch.setattr(backends, "MAX_SHARE", 64 * 1024 * 48 / free)
    before = torch.cuda.memory_allocated()
    few = sample(own, SamplingParams(40), records=False)
    assert torch.cuda.memory_allocated() <= before + (8 << 20)
    assert told
    assert "answers are sampled at once" in told.pop()
    told.clear()
    monkeypatch.setattr(backends, "MAX_SHARE", 0.5)
    same = [one.ending for group in sample(own, SamplingParams(40), records=False) for one in group]
    assert [one.ending for group in few for one in group] == same
