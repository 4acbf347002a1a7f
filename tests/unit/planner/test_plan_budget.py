"""The choice of micro-batch and recompute level: its limits, its order, and what it refuses."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from plans import make_plan
from qwen3_8b import QWEN3_8B

from flatout.config.read import make_config
from flatout.errors import ResourceError
from flatout.planner.devices import DEVICES, GIB, Device
from flatout.planner.memory import budget
from flatout.planner.memory.budget import (
    MARGIN,
    NUM_STEPS_SEEN,
    TokenStatistics,
    choose_micro_batch,
    longest_document_tokens,
    memory_model,
    spend_spare_memory,
    step_tokens,
)
from flatout.planner.parallel_layout import SINGLE_RANK, ParallelLayout
from flatout.planner.settings import PlanSettings
from flatout.trainer.model_shape import make_shape

SHAPE = make_shape(QWEN3_8B)
TOKENS = TokenStatistics(longest_sample=2048, rank_step_tokens=21000, label_share=0.6, mean_length=530.0)


def settings_of(**sections):
    return PlanSettings.of(make_config({"model": {"name": "m"}, **sections}))


def chosen(gib, tokens=TOKENS, **sections):
    return choose_micro_batch(settings_of(**sections), SHAPE, tokens, Device("a GPU", int(gib * GIB)))


def test_less_memory_takes_smaller_passes_and_then_recomputes():
    levels = {gib: chosen(gib) for gib in (139, 79, 28, 24, 20)}
    *kept, last = (decision.recompute for decision in levels.values())
    assert kept == ["none", "none", "none", "budget"]
    # of the 36 layers
    assert 12 < last < 36
    four_bit = chosen(8, base={"storage": "nf4"})
    assert four_bit.recompute == "offload"
    # memory holds the whole step: no reason for a larger number
    assert levels[139].micro_batch_tokens == 21000
    assert 8192 <= levels[79].micro_batch_tokens < 21000
    for decision in levels.values():
        size = TOKENS.micro_batch(decision.micro_batch_tokens)
        assert decision.estimate(size).total_bytes <= decision.budget_bytes
        assert decision.model.estimate(size, decision.recompute) == decision.estimate(size)
        more = decision.model.estimate(TOKENS.micro_batch(decision.micro_batch_tokens + 1024), decision.recompute)
        assert decision.micro_batch_tokens == 21000 or more.total_bytes > decision.budget_bytes
        assert f"recompute {decision.recompute}" in decision.reason


def test_more_memory_never_gives_less():
    for sections in ({}, {"base": {"storage": "nf4"}}):
        decisions = {gib: chosen(gib, **sections) for gib in range(20, 141, 2)}
        costs = [step_tokens(decision, TOKENS, Device("a GPU", gib * GIB)) for gib, decision in decisions.items()]
        assert costs == sorted(costs, reverse=True)
        assert costs[-1] < 0.95 * costs[0]


@pytest.mark.parametrize(("storage", "gib"), [("model", 24), ("nf4", 24), ("nf4", 12)])
def test_the_choice_is_the_fastest_of_all_that_are_given_by_hand(storage, gib):
    """Every level, each with the largest micro-batch that fits; a level that does not fit at all is refused."""
    device, base = Device("a GPU", gib * GIB), {"storage": storage}
    best = step_tokens(chosen(gib, base=base), TOKENS, device)
    others = []
    for level in ("none", "selective", "budget", *range(1, 36), "full", "offload"):
        with suppress(ResourceError):
            others.append(step_tokens(chosen(gib, base=base, recompute=level), TOKENS, device))
    assert len(others) > 3
    assert best == min(others) < 0.9 * max(others)


def test_passes_that_gather_weights_stay_large():
    """Of full fine-tuning over two GPUs: what one GPU does in small passes would gather all weights for each."""
    halves, full = ParallelLayout("fsdp", 2, 1, reshard_after_forward=True), settings_of(method="full", strategy="fsdp")
    decision = choose_micro_batch(full, SHAPE, TOKENS, Device("a GPU", 100 * GIB), halves)
    assert decision.micro_batch_tokens >= 7168
    assert decision.recompute in range(1, 36)
    alone = settings_of(method="full", full={"weights": "bf16"}, model={"name": "m", "precision": "bf16"})
    one = choose_micro_batch(alone, SHAPE, TOKENS, Device("a GPU", 110 * GIB))
    assert one.micro_batch_tokens < 7168
    assert one.recompute == "budget"


def test_a_number_of_layers_lies_between_the_levels():
    model, size = memory_model(settings_of(), SHAPE, Device("a GPU", 24 * GIB)), TOKENS.micro_batch(8192)
    levels = ("budget", *range(1, 36), "full")
    kept = [model.estimate(size, level).activations_bytes for level in levels]
    assert kept == sorted(kept, reverse=True)
    steps = np.diff(kept)
    # each layer that recomputes frees the same
    assert np.allclose(steps, steps[0], rtol=1e-6)
    assert chosen(139, recompute=36).recompute == chosen(139, recompute=99).recompute == "full"
    assert "recompute 12 of 36 layers" in chosen(139, recompute=12).reason


def test_small_steps_need_no_more_than_themselves():
    small = TokenStatistics(500, 3000, 0.5, 250.0)
    assert chosen(33, small).recompute == "none"
    assert chosen(33, small).micro_batch_tokens == 3000
    assert chosen(24).recompute != "none"


def test_a_sample_longer_than_a_busy_micro_batch_decides():
    long = TokenStatistics(18000, 40000, 0.5, 9000.0)
    assert chosen(79).recompute == "none"
    assert chosen(79, long).recompute == "budget"
    assert chosen(79, long).micro_batch_tokens >= 18000


def test_given_settings_are_kept():
    assert chosen(139, recompute="full").recompute == "full"
    fixed = chosen(139, batch={"micro_batch_tokens": 4096})
    assert (fixed.micro_batch_tokens, fixed.recompute) == (4096, "none")
    # the level is the lightest that holds what was asked for; what fits nowhere is tried at the heaviest
    assert chosen(79, batch={"micro_batch_tokens": 20000}).recompute == "budget"
    assert chosen(32, batch={"micro_batch_tokens": 20000}).recompute in range(18, 36)
    assert chosen(20, batch={"micro_batch_tokens": 20000}).recompute == "offload"
    assert chosen(139, memory=48).recompute == chosen(48).recompute
    assert chosen(139, memory=48).micro_batch_tokens == chosen(48).micro_batch_tokens


def test_partial_is_for_compiled_layers():
    for sections in ({"compile": "off"}, {"deterministic": True}, {"model": {"name": "m", "precision": "fp32"}}):
        assert {"selective", "budget"}.isdisjoint({chosen(gib, **sections).recompute for gib in range(48, 130, 8)})
    assert chosen(79, compile="off", recompute="budget").recompute == "full"


def test_indices_of_a_micro_batch_have_32_bits_if_its_samples_allow():
    """Gate and up projection of Qwen3-8B have 24,576 values a token."""
    large = TokenStatistics(longest_sample=2048, rank_step_tokens=300_000, label_share=0.6, mean_length=530.0)
    decision = chosen(139, large, recompute="full")
    assert 2**31 * 0.99 < decision.micro_batch_tokens * 24_576 <= 2**31
    assert "64-bit indices" in decision.reason
    assert decision.accumulates
    eager = chosen(139, large, recompute="full", compile="off")
    assert eager.micro_batch_tokens * 24_576 > 2**31
    assert "64-bit" not in eager.reason
    shared = chosen(139, large, recompute="full", context={"parallel": 2})
    assert shared.micro_batch_tokens == 2 * decision.micro_batch_tokens
    # 131,072 tokens of 16,384 values would be one too many
    layers = tuple(replace(layer, mlp_elements=3 * 8192) for layer in SHAPE.layers)
    power = choose_micro_batch(
        settings_of(recompute="full"), replace(SHAPE, layers=layers), large, Device("a GPU", 139 * GIB)
    )
    assert power.micro_batch_tokens == 131_072 - 512
    # a longer document cannot be cut, and a given size stays
    longer = TokenStatistics(longest_sample=131_072, rank_step_tokens=300_000, label_share=0.6, mean_length=50_000.0)
    assert chosen(139, longer, recompute="full").micro_batch_tokens == 131_072
    given = chosen(139, large, recompute="full", batch={"samples_per_step": 600, "micro_batch_tokens": 100_000})
    assert given.micro_batch_tokens == 100_000


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(budget, "available_host_bytes", lambda: None)
    decision = choose_micro_batch(settings_of(), SHAPE, TOKENS, None)
    assert (decision.micro_batch_tokens, decision.recompute, decision.model) == (8192, "none", None)
    assert decision.estimate(TOKENS.micro_batch(10)) is None
    long = TokenStatistics(9000, 20000, 0.5, 900.0)
    assert choose_micro_batch(settings_of(), SHAPE, long, None).micro_batch_tokens == 9000
    assert choose_micro_batch(settings_of(recompute="budget"), SHAPE, TOKENS, None).recompute == "full"


def test_what_cannot_fit_says_what_to_do():
    with pytest.raises(ResourceError, match="the longest sample has 2,048 tokens") as error:
        chosen(16)
    assert error.value.exit_code == 6
    assert error.value.fixes[0].settings == {"base.storage": "nf4"}
    assert chosen(16, base={"storage": "nf4"}).micro_batch_tokens >= 2048
    with pytest.raises(ResourceError) as error:
        chosen(79, method="full")
    assert {"optim.name": "adamw8bit"} in [fix.settings for fix in error.value.fixes]
    backward = {"method": "full", "full": {"weights": "bf16", "update": "backward"}, "optim": {"max_grad_norm": None}}
    with pytest.raises(ResourceError, match=r"a whole step \(full\.update=backward\) has 21,000 tokens"):
        chosen(72, **backward)
    assert chosen(139, **backward).micro_batch_tokens == 21000


def test_a_card_without_bf16_is_told_of_fp16():
    card = Device("a T4", 24 * GIB, has_bf16=False, has_fp8=False)
    with pytest.raises(ResourceError) as error:
        choose_micro_batch(settings_of(), SHAPE, TOKENS, card)
    fix = error.value.fixes[0]
    assert fix.settings == {"model.precision": "fp16"}
    gib = float(fix.why.removesuffix(" GiB"))
    half = settings_of(model={"name": "m", "precision": "fp16"})
    choose_micro_batch(half, SHAPE, TOKENS, replace(card, memory_bytes=int((gib + 0.1) * GIB)))
    with pytest.raises(ResourceError) as error:
        choose_micro_batch(half, SHAPE, TOKENS, replace(card, memory_bytes=int((gib - 0.1) * GIB)))
    assert "fp16 (about" not in str(error.value)
    # also where fp32 fits
    large = replace(card, memory_bytes=100 * GIB)
    assert "model.precision=fp16 takes about half" in choose_micro_batch(settings_of(), SHAPE, TOKENS, large).reason
    for settings, device in ((half, large), (settings_of(), replace(large, has_bf16=True))):
        assert "fp16" not in choose_micro_batch(settings, SHAPE, TOKENS, device).reason


def test_a_sample_that_just_fits_is_not_rounded_away():
    """The number of tokens is rounded down, but never below the longest sample."""
    limit = longest_document_tokens(settings_of(), SHAPE, Device("a GPU", 22 * GIB), 0.6)
    lengths = [*range(10_000, limit, 1900), *range(limit - 100, limit + 600, 100)]
    fits = [length for length in lengths if _is_taken(TokenStatistics(length, 10**6, 0.6, 1e6))]
    assert fits == [length for length in lengths if length <= fits[-1]]
    assert limit - 100 <= fits[-1] < limit + 512


def _is_taken(tokens):
    try:
        return chosen(22, tokens).micro_batch_tokens >= tokens.longest_sample
    except ResourceError:
        return False


def test_longest_documents_grow_with_memory_and_shrink_with_precision():
    lengths = {
        name: longest_document_tokens(settings_of(), SHAPE, DEVICES[name], 0.6) for name in ("4090", "h100", "h200")
    }
    assert 0 < lengths["4090"] < lengths["h100"] < lengths["h200"]
    four_bit = settings_of(base={"storage": "nf4"})
    assert longest_document_tokens(four_bit, SHAPE, DEVICES["4090"], 0.6) > lengths["4090"]
    assert longest_document_tokens(settings_of(recompute="none"), SHAPE, DEVICES["h200"], 0.6) < lengths["h200"]
    assert longest_document_tokens(settings_of(), SHAPE, DEVICES["t4"], 0.6) == 0


RNG = np.random.default_rng(0)
LENGTHS = np.clip(np.exp(RNG.normal(6.0, 0.8, 32 * 60)), 32, 2048).astype(int)


def decided(gib, *, parallel_layout=SINGLE_RANK, **sections):
    """The decision before and after memory that is spare is spent, and the plan laid out by each."""
    config = settings_of(**{"base": {"storage": "fp8"}, "batch": {"samples_per_step": 32}, **sections})
    device = Device("a GPU", int(gib * GIB))
    whole = make_plan(LENGTHS, LENGTHS // 2, config.batch, micro_batch_tokens=10**6, seed=0, num_ranks=1)
    tokens = TokenStatistics.of(whole)
    before = choose_micro_batch(config, SHAPE, tokens, device, parallel_layout)
    plan = whole.with_layout(before.micro_batch_tokens, whole.batch_layout.cost)
    after = spend_spare_memory(before, config, tokens, device, plan)
    return before, after, plan, plan.with_layout(after.micro_batch_tokens, whole.batch_layout.cost)


def test_gathered_weights_stay_where_memory_is_left():
    """Full fine-tuning of 8B, cut in two: 16 GB of gathered weights beside some 190 GiB."""
    full = {"base": {}, "method": "full", "strategy": "fsdp"}
    halves = ParallelLayout("fsdp", 2, 1, reshard_after_forward=True)
    kept = {}
    for gib in (90, 110, 139, 240):
        before, after, plan, plan_after = decided(gib, parallel_layout=halves, **full)
        assert after.recompute == before.recompute
        kept[gib] = not after.model.parallel_layout.reshard_after_forward
        assert ("gathered weights are kept within a step" in after.reason) == kept[gib]
        assert kept[gib] or after is before
        num_micro_batches = [[len(step.by_rank[0]) for step in one.steps()] for one in (plan, plan_after)]
        assert num_micro_batches[0] == num_micro_batches[1]
        size = TOKENS.micro_batch(after.micro_batch_tokens)
        more_bytes = after.estimate(size).weights_bytes - before.estimate(size).weights_bytes
        # all layers' weights in bf16, less the three layers' that are in flight anyway
        assert more_bytes == (pytest.approx(33 / 36 * 2 * 6.95e9, rel=0.01) if kept[gib] else 0)
    assert kept == {90: False, 110: False, 139: False, 240: True}
    for sections in ({**full, "sharding": {"reshard_after_forward": True}}, {**full, "method": "lora"}):
        before, after, *_ = decided(240, parallel_layout=halves, **sections)
        assert after is before
    whole = ParallelLayout("zero2", 2, 1)
    before, after, *_ = decided(240, parallel_layout=whole, **{**full, "strategy": "zero2"})
    assert after is before


def test_a_longest_sample_in_a_step_that_is_not_seen_is_no_error():
    lengths = np.full(5000, 100)
    # one sample a step: 500 of 5,000 steps are looked at, and this is not one of them
    lengths[1] = 3000
    config = settings_of(batch={"samples_per_step": 1, "shuffle": False})
    plan = make_plan(lengths, lengths // 2, config.batch, micro_batch_tokens=3000, seed=0, num_ranks=1)
    assert max(step.num_tokens for step in plan.sampled_steps(NUM_STEPS_SEEN)) == 100
    tokens = TokenStatistics.of(plan)
    assert tokens.rank_step_tokens == 3000
    assert choose_micro_batch(config, SHAPE, tokens, Device("a GPU", 139 * GIB)).micro_batch_tokens == 3000


def test_a_gpu_without_bf16_computes_in_fp32():
    assert memory_model(settings_of(), SHAPE, DEVICES["t4"]).precision == "fp32"
    assert memory_model(settings_of(), SHAPE, DEVICES["l4"]).precision == "bf16"
    half = settings_of(model={"name": "m", "precision": "fp16"})
    assert memory_model(half, SHAPE, DEVICES["t4"]).precision == "fp16"


def test_statistics_are_those_of_the_steps():
    lengths, labels = [10, 2, 9, 4, 30, 7], [5, 1, 4, 2, 15, 3]
    config = settings_of(batch={"samples_per_step": 2, "epochs": 3.0})
    plan = make_plan(lengths, labels, config.batch, micro_batch_tokens=64, seed=1, num_ranks=2)
    tokens = TokenStatistics.of(plan)
    most = max(sum(batch.num_tokens for batch in rank) for step in plan.steps() for rank in step.by_rank)
    assert tokens == TokenStatistics(30, most, 30 / 62, 62 / 6)
    assert tokens.micro_batch(620).num_documents == 62
    assert MARGIN < 0.1


@pytest.mark.parametrize(
    ("free_gib", "memory", "expected"),
    [
        (200, "auto", (8192, "none")),
        (None, "auto", (8192, "none")),
        (130, "auto", (4096, "none")),
        (200, 130, (4096, "none")),
        (80, 200, (2048, "none")),
        (60, "auto", (2048, 12)),
        (45, "auto", (2048, 30)),
        (1, "auto", (2048, "full")),
    ],
)
def test_a_cpu_takes_the_memory_that_is_there(monkeypatch, free_gib, memory, expected):
    monkeypatch.setattr(budget, "available_host_bytes", lambda: free_gib and free_gib * GIB)
    decision = choose_micro_batch(settings_of(memory=memory), SHAPE, TOKENS, None)
    assert (decision.micro_batch_tokens, decision.recompute) == expected
    # ranks may see different memory, and must plan alike
    several = ParallelLayout(strategy="ddp", num_replicas=2)
    assert choose_micro_batch(settings_of(), SHAPE, TOKENS, None, several).micro_batch_tokens == 8192
    kept = settings_of(memory=memory, recompute="none", batch={"micro_batch_tokens": 3000})
    assert choose_micro_batch(kept, SHAPE, TOKENS, None).micro_batch_tokens == 3000


def test_memory_that_no_plan_of_a_cpu_keeps_is_refused(monkeypatch):
    monkeypatch.setattr(budget, "available_host_bytes", lambda: 200 * GIB)
    with pytest.raises(ResourceError, match=r"memory is 6, but this run takes about ([\d.]+) GiB on the CPU") as raised:
        choose_micro_batch(settings_of(memory=6), SHAPE, TOKENS, None)
    (fix,) = raised.value.fixes
    assert choose_micro_batch(settings_of(**fix.settings), SHAPE, TOKENS, None).recompute == "full"
