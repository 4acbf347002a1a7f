"""Sampling: greedy equals transformers' `generate`, log-probabilities the packed pass, draws depend on nothing else."""

from __future__ import annotations

import copy
import math
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_table import tiny
from tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model, tiny_model
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from usual import every, usual

from flatout.config.schema import BaseConfig, LoraConfig, ModelConfig
from flatout.errors import NumericError, UsageError
from flatout.models.blocks import hidden_states
from flatout.models.export import merge
from flatout.models.load.auto_class import auto_class
from flatout.models.load.model import load_model
from flatout.models.lora.fused import fuse_layers
from flatout.models.lora.layer import add_lora, lora_layers
from flatout.models.model_with_loss import next_logits
from flatout.models.packed import flatten_samples
from flatout.models.token_head import TokenHead
from flatout.rollout import backends
from flatout.rollout.decode import choose, uniform
from flatout.rollout.in_process import InProcess
from flatout.rollout.sampler import Completion, SamplingParams
from flatout.rollout.sampler_model import TOLERANCES, SamplerModel, make_sampler_model

CPU = torch.device("cpu")
PROMPTS = [np.random.default_rng(n).integers(3, VOCAB_SIZE, n).tolist() for n in (5, 17, 1, 9, 12)]
# with states and convolutions, MLA, positions in the embeddings, alibi, and layers that share keys; no cache at all
OTHERS = ("qwen3_next", "lfm2", "falcon_h1", "mamba2", "deepseek_v3", "gpt2", "bloom", "gpt_oss", "cohere2", "rwkv")


def sample(
    sampler_model: SamplerModel, params: SamplingParams, prompts: list[list[int]] = PROMPTS, completions: int = 1
) -> list[list[Completion]]:
    with torch.no_grad():
        return InProcess(sampler_model).sample(prompts, completions, params)


def generated(model: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    """What transformers' own loop writes, one prompt at a time."""
    with torch.no_grad():
        found = model.generate(
            input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=count,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return tuple(found[0, len(prompt) :].tolist())


@pytest.mark.parametrize("dtype", usual([torch.float64, torch.float32], [torch.float64]), ids=["fp64", "fp32"])
@pytest.mark.parametrize("family", usual(FAMILIES, ["mistral", "gemma2", "qwen3_moe"]))
def test_greedy_equals_generate(family, dtype):
    """Prompts of all lengths at once, over windows of 8 tokens; answers to one prompt are the same."""
    model, told = tiny_model(family, dtype, "eager" if family == "gemma2" else "sdpa"), list[str]()
    found = sample(make_sampler_model(model, told.append), SamplingParams(20), completions=2)
    assert not told
    for prompt, (one, other) in zip(PROMPTS, found, strict=True):
        assert one.token_ids == other.token_ids == generated(model, prompt, 20)
        assert (one.ending, len(one.logprobs)) == ("length", 20)


@pytest.mark.parametrize("family", usual(OTHERS, ["qwen3_next", "mamba2", "deepseek_v3", "gpt2", "rwkv"]))
def test_every_family_is_sampled_with_the_cache_that_it_has(family):
    torch.manual_seed(0)
    config = tiny(family)
    model, told = auto_class(config).from_config(config, dtype=torch.float32).eval(), list[str]()
    prompts = [[token_id % 50 + 3 for token_id in prompt] for prompt in PROMPTS[:3]]
    found = sample(make_sampler_model(model, told.append), SamplingParams(10), prompts)
    for prompt, (one,) in zip(prompts, found, strict=True):
        ids = torch.tensor([[*prompt, *one.token_ids]])
        with torch.no_grad():
            true = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert one.token_ids == tuple(true.argmax(-1).tolist())
        expected = true.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        # fp32 rounds otherwise on each kind of CPU: 2.1e-5 was seen for qwen3_next
        assert one.logprobs == pytest.approx(expected.tolist(), abs=4e-5)
    # a model without a cache that transformers can make says so
    assert [line.partition(",")[0] for line in told] == (
        ["every token computes its prompt again"] if family == "rwkv" else []
    )


def load_with_adapter(folder: Path, family: str, storage: Any, lora: dict[str, Any], *, fused: bool) -> Any:
    save_tiny_model(folder, family)
    precision = "fp64" if storage == "model" else "fp32"
    loaded = load_model(
        ModelConfig(name=str(folder), precision=precision), method="lora", device=CPU, seed=0,
        base=BaseConfig(storage=storage),
    )  # fmt: skip
    add_lora(loaded.model, LoraConfig(rank=4, **lora), seed=0)
    for layer in lora_layers(loaded.model).values():
        layer.lora_b.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    if fused:
        fuse_layers(loaded.model)
    loaded.model.eval()
    return loaded


LAYERS = [
    ("qwen3", "model", {}, True), ("qwen3", "model", {}, False), ("mistral", "model", {"dora": True}, False),
    ("qwen3", "nf4", {}, True), ("qwen3", "fp8", {}, False),
    ("qwen3_moe", "model", {"targets": ["all-linear", "experts"]}, False),
]  # fmt: skip


@pytest.mark.parametrize(("family", "storage", "lora", "fused"), every(2, LAYERS[::-1]))
def test_log_probabilities_are_those_of_the_pass_that_trains(tmp_path, family, storage, lora, fused):
    """Unmerged adapters, fused layers and quantized weights: all answers in one packed pass, at temperature 1."""
    loaded = load_with_adapter(tmp_path, family, storage, lora, fused=fused)
    told = list[str]()
    sampler_model = SamplerModel(
        pretrained=loaded.model, logits=lambda batch: next_logits(loaded.model, batch), device=CPU,
        tolerance=TOLERANCES[loaded.dtype], max_pass_tokens=32, is_padded=False, packed_context=nullcontext,
        log=told.append,
    )  # fmt: skip
    found = sample(sampler_model, SamplingParams(12, temperature=1.0), completions=3)
    assert not told
    sequences, masks = [], []
    for prompt, group in zip(PROMPTS, found, strict=True):
        for one in group:
            sequences.append(np.array([*prompt, *one.token_ids]))
            masks.append(np.arange(len(sequences[-1])) >= len(prompt))
    batch = flatten_samples(list(zip(sequences, masks, strict=True)))
    with torch.no_grad():
        states = hidden_states(loaded.model, batch).index_select(0, batch.label_rows)
        losses = TokenHead(loaded.model, 64).token_losses(states, batch.label_ids).losses
    ours = torch.tensor([value for group in found for one in group for value in one.logprobs], dtype=torch.float64)
    differences = (ours + losses.double()).abs()
    limit = 1e-12 if loaded.dtype == torch.float64 else 1e-4
    if storage == "fp8":  # inputs that differ in the last bit may be rounded to different fp8 values
        assert float(differences.max()) < 0.1
        assert float((differences < limit).double().mean()) > 0.9
    else:
        assert float(differences.max()) < limit
    assert len({one.token_ids for one in found[1]}) == 3


@pytest.mark.parametrize("backend", ["slots", "own cache", "recomputed"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_log_probabilities_are_of_the_distribution_drawn_from(family, backend):
    """Those of plain torch over transformers' logits, which gemma2 caps: before cuts, and greedy at temperature 1."""
    model, told = tiny_model(family, torch.float64, "eager" if family == "gemma2" else "sdpa"), list[str]()
    for temperature, cuts in ((0.7, {}), (0.3, {"top_k": 9, "repetition_penalty": 1.3}), (0.0, {})):
        sampler = InProcess(make_sampler_model(model, told.append))
        sampler.known = {name: False for name in ("slots", "own cache") if name != backend}
        with torch.no_grad():
            found = sampler.sample(PROMPTS[:3], 2, SamplingParams(9, temperature, **cuts))
        assert sampler.known.get(backend, True), "it was proved at this temperature"
        for prompt, group in zip(PROMPTS, found, strict=False):
            for one in group:
                ids = torch.tensor([[*prompt, *one.token_ids]])
                with torch.no_grad():
                    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
                true = (logits / (temperature or 1)).log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
                # gemma2's norms are in fp32
                limit = 1e-10 if family == "qwen3" else 1e-5
                assert one.logprobs == pytest.approx(true[:, 0].tolist(), abs=limit)
    assert not told


def test_kept_slots_are_those_of_later_calls_that_fit():
    """They read weights that changed in place, and are free after `release`, a call of another size, or by default."""
    model = tiny_model("qwen3", torch.float64, "sdpa")
    caches = list[Any]()

    def logits(batch: Any) -> torch.Tensor:
        # a step's, not those that measure a token
        if batch.cache is not None and batch.cache.reads is not None and caches[-1:] != [weakref.ref(batch.cache)]:
            caches.append(weakref.ref(batch.cache))
        return next_logits(model, batch)

    own = replace(make_sampler_model(model), logits=logits)
    sampler, hot = InProcess(own, keeps_slots=True, slot_length=40), SamplingParams(12, temperature=0.7)

    def opened(params: SamplingParams, prompts: Any = PROMPTS) -> int:
        """How many slots a call opens, whose answers are those of a sampler of its own."""
        before = len(caches)
        with torch.no_grad():
            found = sampler.sample(prompts, 2, params)
        new = len(caches) - before
        assert found == sample(own, params, prompts, 2)
        del caches[before + new :]
        return new

    assert opened(hot) == 1
    model.lm_head.weight.data.mul_(1.5)
    stops = frozenset(range(20, 40))
    assert [opened(replace(hot, seed=1)), opened(replace(hot, max_new_tokens=20, stop_ids=stops), PROMPTS[1:4])] == [
        0,
        0,
    ]

    def fails(*token: int) -> None:
        raise ValueError("the caller's own")

    for needs_other in (replace(hot, temperature=0.9), replace(hot, max_new_tokens=60)):
        first = caches[-1]
        assert first() is not None
        assert opened(needs_other) == 1
        assert first() is None
    assert opened(replace(hot, max_new_tokens=60)) == 0
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert opened(replace(hot, max_new_tokens=60)) == 1, "weights have moved"
    with torch.no_grad(), pytest.raises(ValueError, match="the caller's own"):
        sampler.sample(PROMPTS, 2, replace(hot, max_new_tokens=60), fails)
    assert caches[-1]() is None
    assert opened(hot) == 1
    assert [sampler.release(), sampler.release()] == [True, False]
    assert caches[-1]() is None
    sampler.keeps_slots = False
    assert opened(hot) == 1
    assert caches[-1]() is None


def test_draws_depend_on_seed_prompt_and_completion_alone(monkeypatch):
    """However many places there are, who ends when, and what else is sampled."""
    model = tiny_model("qwen3", torch.float64, "sdpa")
    sampler_model, stops = make_sampler_model(model), frozenset(range(20, 30))
    params = SamplingParams(30, temperature=1.0, top_k=80, top_p=0.95, seed=7, stop_ids=stops)
    found = sample(sampler_model, params, completions=4)
    state = torch.get_rng_state()
    for places in (1, 3, 64):
        monkeypatch.setattr(backends, "MAX_SLOTS", places)
        assert [[one.token_ids for one in group] for group in sample(sampler_model, params, completions=4)] == [
            [one.token_ids for one in group] for group in found
        ]
    fewer = sample(sampler_model, params, PROMPTS[:2], completions=2)
    assert [[one.token_ids for one in group] for group in fewer] == [
        [one.token_ids for one in group[:2]] for group in found[:2]
    ]
    # shares of the prompts, as ranks take them
    indices = set[int]()
    for share in ([0, 2, 4], [3, 1]):
        with torch.no_grad():
            own = InProcess(sampler_model).sample(
                [PROMPTS[number] for number in share], 4, params, lambda *token: indices.add(token[0]), share
            )
        assert [[one.token_ids for one in group] for group in own] == [
            [one.token_ids for one in found[number]] for number in share
        ]
    assert indices == {0, 1, 2}
    assert torch.equal(torch.get_rng_state(), state)
    everything = [one for group in found for one in group]
    assert len({one.token_ids for one in everything}) > 15
    assert {one.ending for one in everything} == {"stop", "length"}
    for one in everything:
        assert (one.token_ids[-1] in stops) == (one.ending == "stop")
        assert not stops.intersection(one.answer_ids)
    other = sample(sampler_model, SamplingParams(30, temperature=1.0, seed=8, stop_ids=stops))
    assert [one.token_ids for (one,) in other] != [group[0].token_ids for group in found]


def test_cuts_are_those_of_transformers():
    torch.manual_seed(0)
    prompt = torch.randint(0, 2100, (1, 40))
    logits = torch.randn(1, 2100) * 4
    theirs = LogitsProcessorList([
        RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7), TopKLogitsWarper(50),
        TopPLogitsWarper(0.8), MinPLogitsWarper(0.01),
    ])(prompt, logits).softmax(-1)[0]  # fmt: skip
    params = SamplingParams(1, temperature=0.7, top_k=50, top_p=0.8, min_p=0.01, repetition_penalty=1.3)
    count = 2000
    seen = torch.zeros(1, 2100, dtype=torch.bool).scatter_(1, prompt, True)
    draws, logprobs = choose(
        logits.expand(count, -1), params, torch.arange(count), torch.zeros(count, dtype=torch.int64),
        seen.expand(count, -1),
    )  # fmt: skip
    counts = torch.bincount(draws, minlength=2100)
    assert set(counts.nonzero().flatten().tolist()) <= set(theirs.nonzero().flatten().tolist())
    likely = theirs * count > 50
    # four standard deviations
    assert bool(((counts - theirs * count).abs() <= 4 * (theirs * count).sqrt())[likely].all())
    # before the penalty and the cuts
    assert torch.allclose(logprobs, (logits / 0.7).log_softmax(-1)[0, draws], atol=1e-6)


def test_random_numbers_are_uniform_and_their_own():
    keys = torch.arange(1 << 14) * 977
    numbers = torch.stack([uniform(keys, torch.full_like(keys, count)) for count in range(8)])
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    assert len(numbers.unique()) == numbers.numel()
    counts = torch.histc(numbers.float(), 64, 0, 1)
    assert float((counts - counts.mean()).abs().max()) < 5 * math.sqrt(float(counts.mean()))
    assert abs(float(torch.corrcoef(numbers)[0, 1])) < 0.03


def test_an_answer_ends_where_positions_do():
    sampler_model = make_sampler_model(tiny_model("qwen3", torch.float32, "sdpa"))
    found = sample(sampler_model, SamplingParams(20, max_positions=20))
    lengths = [min(20, 20 - len(prompt)) for prompt in PROMPTS]
    assert [len(one.token_ids) for (one,) in found] == lengths
    assert [one.ending for (one,) in found] == ["positions"] * 5
    assert [one.ending for (one,) in sample(sampler_model, SamplingParams(3, max_positions=20))] == ["length"] * 5
    with pytest.raises(UsageError, match="prompt 2 has 17 tokens, and the model 17 positions"):
        sample(sampler_model, SamplingParams(20, max_positions=17))
    with pytest.raises(UsageError, match="prompt 1 has no tokens"):
        sample(sampler_model, SamplingParams(20), [[]])


def test_what_a_caller_does_wrong_gives_up_no_cache():
    sampler_model = make_sampler_model(tiny_model("qwen3", torch.float64, "sdpa"))
    sampler, params = InProcess(sampler_model), SamplingParams(3)

    def fails(*token: int) -> None:
        raise ValueError("the caller's own")

    with torch.no_grad():
        assert sampler.sample([], 1, params) == []
        with pytest.raises(ValueError, match="the caller's own"):
            sampler.sample(PROMPTS, 1, params, fails)
        assert False not in sampler.known.values()
        sampler.sample(PROMPTS, 1, params, lambda *token: None)
    assert sampler.known == {"slots": True}


def test_damaged_weights_are_no_answer():
    model = tiny_model("qwen3", torch.float32, "sdpa")
    model.lm_head.weight.data[:] = math.nan
    with pytest.raises(NumericError, match="the answer to prompt 1 has the log-probability nan"):
        sample(make_sampler_model(model), SamplingParams(12))


def test_unmerged_answers_equal_merged_ones():
    model = tiny_model("qwen3", torch.float64, "sdpa")
    plain = sample(make_sampler_model(model), SamplingParams(20))
    add_lora(model, LoraConfig(rank=4), seed=0)
    for layer in lora_layers(model).values():
        layer.lora_b.data.normal_(0, 0.3)
    merged = copy.deepcopy(model)
    assert merge(merged)
    found = sample(make_sampler_model(model), SamplingParams(20))
    assert [one.token_ids for (one,) in found] == [generated(merged, prompt, 20) for prompt in PROMPTS]
    assert [one.token_ids for (one,) in found] != [one.token_ids for (one,) in plain]
