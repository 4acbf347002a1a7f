"""Which strategy a run gets, what it refuses, and the memory of state that is cut."""

import re

import pytest
from qwen3_8b import QWEN3_8B

from flatout.config.read import make_config
from flatout.errors import ProblemsError, UsageError
from flatout.planner.devices import DEVICES, GIB, Device
from flatout.planner.memory.budget import TokenStatistics, choose_micro_batch, choose_parallel_layout
from flatout.planner.memory.estimate import MemoryModel
from flatout.planner.memory.sizes import MicroBatchSize
from flatout.planner.parallel_layout import ParallelLayout
from flatout.planner.settings import PlanSettings
from flatout.trainer.model_shape import make_shape

SHAPE = make_shape(QWEN3_8B)
TOKENS = TokenStatistics(longest_sample=2048, rank_step_tokens=21000, label_share=0.6, mean_length=530.0)
NOTHING = MicroBatchSize(0, 0, 0)


def settings_of(**sections):
    return PlanSettings.of(make_config({"model": {"name": "m"}, **sections}))


def parallel_layout(device="h100", num_ranks=4, num_nodes=1, **sections):
    gpu = DEVICES[device] if device else None
    return choose_parallel_layout(settings_of(**sections), SHAPE, TOKENS, gpu, num_ranks=num_ranks, num_nodes=num_nodes)


def test_auto_replicates_what_fits_and_cuts_what_does_not():
    assert parallel_layout(num_ranks=1).strategy == "single"
    assert parallel_layout().strategy == "ddp"
    assert "which fits with" in parallel_layout().reason
    # 8.2 billion weights with two moments and gradients are 122 GiB in fp32
    full = parallel_layout(method="full")
    assert (full.strategy, full.num_shards, full.reshard_after_forward, full.lockstep) == ("fsdp", 4, True, True)
    assert "does not fit with" in full.reason
    nodes = parallel_layout(method="full", num_ranks=16, num_nodes=2)
    assert (nodes.strategy, nodes.num_replicas, nodes.num_shards) == ("hsdp", 2, 8)
    assert parallel_layout(None, method="full").strategy == "ddp"
    lean = parallel_layout(method="full", optim={"name": "adamw8bit"}, full={"weights": "bf16"})
    assert (lean.strategy, "which fits with" in lean.reason) == ("ddp", True)


def test_auto_cuts_a_quantized_base_that_does_not_fit():
    sections = {"method": "lora", "base": {"storage": "nf4"}}
    small = Device("a GPU", 9 * GIB)
    chosen = [
        choose_parallel_layout(settings_of(**sections), SHAPE, TOKENS, gpu, num_ranks=4, num_nodes=1)
        for gpu in (DEVICES["h100"], small)
    ]
    assert [parallel_layout.strategy for parallel_layout in chosen] == ["ddp", "fsdp"]
    estimate = MemoryModel(settings_of(**sections), SHAPE, "bf16", True, chosen[1]).estimate(NOTHING, "full")
    assert estimate.state_bytes < 5 * GIB


def test_auto_says_that_it_fits_before_why_it_could_not_be_cut():
    low_bits = {"method": "lora", "base": {"storage": "nf4", "compute": "fp8"}}
    fits, small = (
        choose_parallel_layout(settings_of(**low_bits), SHAPE, TOKENS, gpu, num_ranks=2, num_nodes=1)
        for gpu in (DEVICES["h100"], Device("a GPU", 9 * GIB))
    )
    assert (fits.strategy, small.strategy) == ("ddp", "ddp")
    assert "which fits with" in fits.reason
    assert "sharding" not in fits.reason
    assert re.search("does not fit with .*, but sharding does not work with base.compute: fp8 over nf4", small.reason)


def test_what_is_asked_for_is_taken_or_refused():
    assert parallel_layout(strategy="zero1").reshard_after_forward is False
    assert parallel_layout(strategy="zero3", sharding={"reshard_after_forward": False}).reshard_after_forward is False
    assert parallel_layout(strategy="hsdp", sharding={"replicas": 2}).num_shards == 2
    assert parallel_layout(strategy="zero3", num_ranks=1).strategy == "single"
    # ranks sample alone where a pass gathers nothing
    in_lockstep = {
        name: parallel_layout(strategy=name).lockstep_in_inference
        for name in ("ddp", "zero1", "zero2", "zero3", "fsdp")
    }
    assert in_lockstep == {"ddp": False, "zero1": False, "zero2": False, "zero3": True, "fsdp": True}
    assert parallel_layout(strategy="zero1", sharding={"reshard_after_forward": True}).lockstep_in_inference
    stages = [
        parallel_layout(strategy="deepspeed", deepspeed={"zero_optimization": {"stage": stage}}) for stage in (1, 2, 3)
    ]
    assert [(each.lockstep, each.lockstep_in_inference, each.sums_late, each.compiles) for each in stages] == [
        (True, False, True, True),
        (True, False, False, True),
        (True, True, False, False),
    ]
    for wrong, message in (
        ({"strategy": "single"}, "strategy: single is for one rank; got 4"),
        ({"strategy": "hsdp"}, r"at least two replicas of equal size.*got 1"),
        ({"strategy": "hsdp", "sharding": {"replicas": 4}}, "got 4"),
        ({"strategy": "hsdp", "sharding": {"replicas": 3}}, "got 3"),
    ):
        with pytest.raises(UsageError, match=message):
            parallel_layout(**wrong)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"strategy": "fsdp", "model": {"name": "m", "precision": "fp16"}}, "fsdp does not work with model.precision"),
        ({"strategy": "zero2", "base": {"storage": "nf4", "compute": "fp8"}}, "zero2 does not work with base.compute"),
        ({"strategy": "fsdp", "base": {"backward": "fp8"}}, "fsdp does not work with base.backward: fp8, which copies"),
        ({"strategy": "deepspeed", "method": "full", "optim": {"name": "adamw8bit"}}, "optim.name: adamw8bit"),
        *(
            ({"strategy": strategy, "optim": {"name": name}}, f"{strategy} does not work with optim.name: {name}")
            for name in ("muon", "adafactor")
            for strategy in ("zero1", "zero2", "zero3", "fsdp", "hsdp", "deepspeed")
        ),
        ({"strategy": "deepspeed", "method": "full", "full": {"weights": "bf16"}}, "full.weights: bf16"),
        (
            {"strategy": "deepspeed", "method": "full", "full": {"compute": "fp8_rowwise"}},
            "full.compute: fp8_rowwise",
        ),
        ({"strategy": "ddp", "sharding": {"offload": True}}, "sharding.offload needs a strategy that shards"),
        ({"strategy": "fsdp", "sharding": {"replicas": 2}}, "sharding.replicas is only for strategy: hsdp"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together(sections, message):
    with pytest.raises(ProblemsError, match=message) as caught:
        make_config({"model": {"name": "m"}, **sections})
    (fix,) = caught.value.fixes
    assert fix.settings.keys() == {"strategy"}
    make_config({"model": {"name": "m"}, **sections}, [str(fix)])


def states(strategy, num_shards=4, offload=False, frees=True, **sections):
    config = settings_of(**{"method": "full", **sections})
    cut = ParallelLayout(strategy, num_shards, 1, frees, offload, sums_late=strategy == "zero1")
    return MemoryModel(config, SHAPE, "bf16", True, cut).estimate(NOTHING, "full")


def test_each_stage_cuts_more():
    whole, zero1, zero2, zero3 = (states(name, frees=name == "zero3") for name in ("ddp", "zero1", "zero2", "zero3"))
    assert whole.optimizer_bytes == SHAPE.num_params * 8
    for cut in (zero1, zero2, zero3):
        assert cut.optimizer_bytes == whole.optimizer_bytes // 4
    assert zero1.gradients_bytes > zero2.gradients_bytes >= zero3.gradients_bytes
    assert zero1.weights_bytes == zero2.weights_bytes > zero3.weights_bytes > whole.weights_bytes // 4
    assert whole.state_bytes > zero1.state_bytes > zero2.state_bytes > zero3.state_bytes
    more = states("zero3", num_shards=8)
    assert more.state_bytes < zero3.state_bytes
    offloaded = states("zero3", offload=True)
    assert offloaded.optimizer_bytes == 0
    # what is gathered stays: the embedding and the head, and some layers
    assert 5 * GIB < offloaded.weights_bytes < 8 * GIB


def test_frozen_weights_are_cut_where_they_are_freed():
    sections = {"method": "lora", "base": {"storage": "nf4"}}
    whole, cut = states("ddp", **sections).weights_bytes, states("zero3", **sections).weights_bytes
    # a part, three layers in flight, and the embedding and head whole
    root = 2 * 2 * QWEN3_8B["vocab_size"] * QWEN3_8B["hidden_size"]
    assert cut - root == pytest.approx((whole - root) * (1 / 4 + 3 / 36), rel=1e-3)
    assert states("zero2", frees=False, **sections).weights_bytes == whole
    assert states("zero2", frees=False, method="lora").weights_bytes == SHAPE.num_params * 2
    dense = states("zero3", num_shards=8, method="lora").weights_bytes
    assert SHAPE.num_params * 2 / 8 < dense < SHAPE.num_params * 2 / 2


def test_the_memory_decision_counts_the_spread():
    config, gpu = settings_of(method="full", optim={"name": "adamw"}), Device("a GPU", 79 * GIB)
    decision = choose_micro_batch(config, SHAPE, TOKENS, gpu, ParallelLayout("fsdp", 8, 1, True))
    assert decision.estimate(TOKENS.micro_batch(decision.micro_batch_tokens)).total_bytes < 79 * GIB
