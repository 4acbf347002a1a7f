"""The memory model: its parts against real tensors' sizes, its totals against peaks measured on a GPU."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from qwen3_8b import QWEN3_8B
from transformers import AutoConfig, AutoModelForCausalLM

from flatout.checkpoint.optimizer_state import state_sizes
from flatout.config.optim import OPTIMIZERS, OptimConfig
from flatout.config.read import make_config
from flatout.models.lora.layer import add_lora, hidden_matrices, trainable_parameters
from flatout.optim.build import make_optimizer
from flatout.planner.devices import ANY_DEVICE, GIB
from flatout.planner.memory.budget import CPU, memory_model
from flatout.planner.memory.estimate import (
    MemoryModel,
    activation_elements,
)
from flatout.planner.memory.sizes import MicroBatchSize
from flatout.planner.parallel_layout import SINGLE_RANK, resolve_layout
from flatout.planner.settings import PlanSettings
from flatout.trainer.model_shape import make_shape

SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
MIDDLE = {"hidden_size": 2048, "intermediate_size": 6144}
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
SHAPE = make_shape(QWEN3_8B)
SIZE = MicroBatchSize(16384, 9000, 32)


def estimate(
    *, shape=SHAPE, size=SIZE, recompute="none", precision="bf16", compiled=True, parallel_layout=SINGLE_RANK,
    accumulates=True, **sections,
):  # fmt: skip
    config = PlanSettings.of(make_config({"model": {"name": "m"}, "lora": {"rank": 16}} | sections))
    model = MemoryModel(config, shape, precision, compiled, parallel_layout)
    return model.estimate(size, recompute, accumulates=accumulates)


# LoRA in fp32 on two cores: tokens of a pass, recompute, resident GiB of several steps of rounds or of rows
SMOLLM = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
ON_CPU = [(2016, "none", 6.33), (8064, "none", 15.2), (2016, "full", 1.58), (4032, "full", 1.66), (8064, "full", 2.34)]


@pytest.mark.parametrize(("tokens", "recompute", "gib"), ON_CPU)
def test_what_a_cpu_holds_is_planned_with_what_its_allocator_keeps(tokens, recompute, gib):
    """It is a part of its own, which a GPU's plan lacks."""
    settings = PlanSettings.of(make_config({"model": {"name": "m"}}))
    size, shape = MicroBatchSize(tokens, tokens // 4, tokens // 63), make_shape(SMOLLM)
    planned = memory_model(settings, shape, CPU).estimate(size, recompute)
    assert planned.total_bytes / GIB == pytest.approx(gib, rel=0.15)
    on_gpu = memory_model(settings, shape, ANY_DEVICE).estimate(size, recompute)
    assert planned.process_bytes > 0 == on_gpu.process_bytes


def tiny_llama():
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "llama",
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=96,
        )
    )


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", [name for name, traits in OPTIMIZERS.items() if not traits.stores_8_bits])
def test_weights_gradients_and_optimizer_are_the_real_bytes(method, name):
    model = tiny_llama()
    shape = make_shape(model.config.to_dict())
    if method == "lora":
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    matrices = hidden_matrices(model) if method == "full" else {*named}
    optimizer = make_optimizer(named, OptimConfig(name=name), matrices=matrices)
    model(input_ids=torch.arange(10)[None]).logits.sum().backward()
    optimizer.step()
    moments = [
        value
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step" and value is not None
    ]
    guess = estimate(shape=shape, method=method, precision="fp32", size=MicroBatchSize(10, 10, 1), optim={"name": name})
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert guess.weights_bytes + guess.adapter_bytes == weights
    assert guess.gradients_bytes == sum(parameter.grad.nbytes for parameter in named.values())
    assert guess.optimizer_bytes == sum(value.nbytes for value in moments)


UNTIED = {"model_type": "llama", "tie_word_embeddings": False}
STACKED = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OF_EXPERTS = {"rank": 4, "targets": ["q_proj", "gate_up_proj", "down_proj"]}


@pytest.mark.parametrize("name", [name for name, traits in OPTIMIZERS.items() if traits.reads_whole])
@pytest.mark.parametrize(
    ("model", "sections"),
    [
        (UNTIED, {"method": "full"}),
        (UNTIED, {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}}),
        (STACKED, {"lora": OF_EXPERTS}),
        (STACKED, {"method": "full"}),
    ],
)
def test_state_by_the_shapes_of_weights_is_the_real_bytes(model, sections, name):
    """Of heads, of experts in one tensor and of their adapters; routers are planned as vectors."""
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96}
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes, **model))
    shape, config = make_shape(built.config.to_dict()), make_config({"model": {"name": "m"}, **sections})
    if config.method == "lora":
        add_lora(built, config.lora, seed=0)
    named, matrices = trainable_parameters(built), hidden_matrices(built)
    optim = OptimConfig(name=name)
    optimizer = make_optimizer(named, optim, matrices=matrices)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [(key, value) for state in optimizer.state.values() for key, value in state.items() if value is not None]
    real = sum(value.nbytes for key, value in states if key != "step")
    assert sum(state_sizes(named, optim, matrices)) == real + sum(parameter.nbytes for parameter in named.values())
    size = MicroBatchSize(10, 10, 1)
    planned = estimate(shape=shape, precision="fp32", size=size, optim={"name": name}, **sections).optimizer_bytes
    routers = [p for key, p in named.items() if key.endswith("mlp.gate.weight") and name == "adafactor"]
    assert planned - real == sum(4 * (p.numel() - sum(p.shape)) for p in routers)


# tokens, label tokens and peak GiB allocated in the largest micro-batch of runs on H200s; the tokens of the runs with a
# memory budget are not known exactly, so the middle of the others' stands for them
LARGE = MicroBatchSize(17397, 10450, 32)
LARGEST = MicroBatchSize(20750, 12464, 32)
SMALLER = MicroBatchSize(12484, 7490, 32)
HALF = MicroBatchSize(10409, 6245, 16)
ATTENTION = {"rank": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
EXPERTS = {"rank": 16, "targets": [*ATTENTION["targets"], "gate_up_proj", "down_proj"]}
MEASURED = [
    ("8b", {"size": MicroBatchSize(21021, 12626, 32)}, 116.8),
    ("8b", {"size": MicroBatchSize(21345, 12821, 32)}, 115.7),
    ("8b", {"size": MicroBatchSize(21184, 12720, 32), "recompute": "budget"}, 69.2),
    ("0.6b", {"size": LARGE}, 22.5),
    ("0.6b", {"size": LARGE, "compiled": False}, 30.0),
    ("8b", {"size": LARGE}, 97.9),
    ("8b", {"size": LARGE, "base": {"storage": "fp8"}}, 91.4),
    ("8b", {"size": LARGE, "base": {"storage": "nf4", "compute": "fp8"}}, 88.3),
    ("8b", {"size": MicroBatchSize(1960, 1178, 4), "base": {"storage": "nf4"}, "recompute": "full"}, 7.5),
    ("8b", {"size": SMALLER, "recompute": "full"}, 21.7),
    ("8b", {"size": LARGE, "recompute": "offload"}, 18.4),
    ("8b", {"size": MicroBatchSize(131072, 78643, 1), "recompute": "full"}, 74.7),
    ("1.7b", {"size": LARGEST, "method": "full"}, 67.5),
    ("1.7b", {"size": LARGEST, "method": "full", "full": {"weights": "bf16"}}, 58.5),
    (
        "8b",
        {
            "size": MicroBatchSize(16824, 10107, 32),
            "method": "full",
            "full": {"weights": "bf16"},
            "optim": {"name": "adamw8bit"},
        },
        115.1,
    ),
    ("30b-a3b", {"size": LARGEST, "lora": ATTENTION}, 119.7),
    ("30b-a3b", {"size": LARGEST, "lora": EXPERTS}, 130.2),
    ("30b-a3b", {"size": LARGE, "lora": EXPERTS, "base": {"storage": "fp8"}}, 94.3),
    (
        "30b-a3b",
        {
            "size": MicroBatchSize(1960, 1178, 4),
            "lora": EXPERTS,
            "base": {"storage": "nf4"},
            "optim": {"name": "adamw8bit"},
            "recompute": "full",
        },
        23.1,
    ),
]
# full fine-tuning over GPUs, one micro-batch a step: tokens, GPUs and peak GiB of one
SHARE = MicroBatchSize(9388, 5633, 16)
KEPT, FREED = ({"reshard_after_forward": frees} for frees in (False, True))
SPREAD = [
    ("1.7b", HALF, 2, {"strategy": "ddp"}, 46.6),
    ("1.7b", HALF, 2, {"strategy": "zero1"}, 38.2),
    ("1.7b", HALF, 2, {"strategy": "zero2"}, 38.2),
    ("1.7b", HALF, 2, {"strategy": "zero3", "sharding": KEPT}, 38.2),
    ("8b", HALF, 2, {"strategy": "fsdp", "sharding": KEPT}, 121),
    ("8b", HALF, 2, {"strategy": "fsdp", "sharding": FREED}, 108),
    ("8b", SHARE, 4, {"strategy": "zero1"}, 93.6),
    ("8b", SHARE, 4, {"strategy": "zero2"}, 93.6),
    ("8b", SHARE, 4, {"strategy": "zero3", "sharding": KEPT}, 93.6),
]
# by DeepSpeed's stage; what it holds depends on buckets of its own
DEEPSPEED = [
    ("1.7b", HALF, 2, 1, 42.0),
    ("1.7b", HALF, 2, 2, 35.6),
    ("1.7b", HALF, 2, 3, 53.4),
    ("8b", SHARE, 4, 1, 118.5),
    ("8b", SHARE, 4, 2, 94.1),
    ("8b", SHARE, 4, 3, 111.4),
]


def shape_of(model):
    return make_shape(QWEN3_8B | {"8b": {}, "1.7b": SMALL | MIDDLE, "0.6b": SMALL, "30b-a3b": MOE}[model])


@pytest.mark.parametrize(("model", "settings", "measured_gib"), MEASURED)
def test_totals_are_close_to_measured_peaks(model, settings, measured_gib):
    estimated = estimate(shape=shape_of(model), accumulates=False, **settings)
    assert estimated.total_bytes / GIB == pytest.approx(measured_gib, rel=0.03)


def spread_gib(model, size, num_ranks, **sections):
    config = PlanSettings.of(make_config({"model": {"name": "m"}, "method": "full", **sections}))
    parallel_layout = resolve_layout(config, config.strategy, num_ranks=num_ranks, num_nodes=1, why="")
    sections |= {
        "parallel_layout": parallel_layout,
        "compiled": parallel_layout.compiles,
        "size": size,
        "method": "full",
    }
    return estimate(shape=shape_of(model), accumulates=False, **sections).total_bytes / GIB


@pytest.mark.parametrize(("model", "size", "num_ranks", "sections", "measured_gib"), SPREAD)
def test_totals_of_spread_runs_are_close_to_measured_peaks(model, size, num_ranks, sections, measured_gib):
    assert spread_gib(model, size, num_ranks, **sections) == pytest.approx(measured_gib, rel=0.025)


def test_a_shared_micro_batch_is_close_to_its_measured_peak():
    # two H200s: 262,144 tokens of one document
    layout = replace(SINGLE_RANK, strategy="ddp", context_ranks=2)
    size = MicroBatchSize(262144, 157287, 1)
    guess = estimate(shape=shape_of("8b"), size=size, recompute="full", accumulates=False, parallel_layout=layout)
    assert guess.total_bytes / GIB == pytest.approx(75.4, rel=0.02)

    # with more ranks, keys and values of all tokens take more than the MLP
    def working(num_ranks):
        layout = replace(SINGLE_RANK, strategy="ddp", context_ranks=num_ranks)
        size = MicroBatchSize(32768 * num_ranks, 1, 1)
        return estimate(shape=shape_of("8b"), size=size, recompute="full", parallel_layout=layout).working_bytes

    assert working(1) == working(2) < working(8) < working(16)


@pytest.mark.parametrize(("model", "size", "num_ranks", "stage", "measured_gib"), DEEPSPEED)
def test_totals_under_deepspeed_are_close_to_measured_peaks(model, size, num_ranks, stage, measured_gib):
    settings = {"strategy": "deepspeed", "deepspeed": {"zero_optimization": {"stage": stage}}}
    assert spread_gib(model, size, num_ranks, **settings) == pytest.approx(measured_gib, rel=0.08)


def test_activations_per_token_of_an_8b_model():
    # residuals, norm outputs, q k v twice and output, gate, up and product: 4.9 MB a token in bf16
    fat, inputs = 16384 * 4.944e6, 16384 * 36 * 8192
    assert 36 * (activation_elements(SHAPE) * 2 + 32 * 4) == pytest.approx(4.944e6, rel=1e-3)
    assert estimate().activations_bytes == pytest.approx(fat, rel=1e-3)
    assert estimate(recompute="full").activations_bytes == inputs
    assert estimate(recompute="offload").activations_bytes == inputs * 3 // 36
    kept = [estimate(recompute=level).total_bytes for level in ("none", "selective", "budget", "full", "offload")]
    assert kept == sorted(kept, reverse=True)
    # what a layer computes again stands beside the gradients while it does
    long = MicroBatchSize(65536, 1, 1)
    working = [estimate(size=long, recompute=level).working_bytes for level in ("none", "selective", "budget", "full")]
    assert working == sorted(set(working))
    # logits and what the last norm saves count where one layer takes less
    wide = [estimate(size=MicroBatchSize(num_tokens, 2048, 8)).working_bytes for num_tokens in (8192, 16384)]
    assert wide[1] - wide[0] == 8192 * 4096 * 10


def test_mixture_of_experts_counts_the_tokens_experts():
    shape = make_shape(QWEN3_8B | MOE)
    assert 48 * (activation_elements(shape) * 2 + 32 * 4) == pytest.approx(7.04e6, rel=0.01)


def test_precisions_methods_and_optimizers():
    count = SHAPE.num_params
    assert estimate().weights_bytes == 2 * count
    assert estimate(precision="fp32").weights_bytes == 4 * count
    full = estimate(method="full")
    # fp32 masters, bf16 copies of autocast, fp32 gradients, two fp32 moments
    assert full.weights_bytes + full.gradients_bytes + full.optimizer_bytes == (4 + 2 + 4 + 8) * count
    assert full.adapter_bytes == 0
    lean = estimate(method="full", full={"weights": "bf16"}, optim={"name": "adamw8bit"})
    assert (lean.weights_bytes, lean.gradients_bytes) == (2 * count, 2 * count)
    assert lean.optimizer_bytes == pytest.approx(2.03 * count, rel=1e-6)
    targeted = SHAPE.targeted(make_config({"model": {"name": "m"}, "lora": {"rank": 16}}).lora).values()
    moments = sum(16 * (2.03 * linear.num_in + 8 * linear.num_out) for linear in targeted)
    adapter = estimate(optim={"name": "adamw8bit"})
    assert adapter.optimizer_bytes == pytest.approx(moments), "B has rows of 16 values, whose moments are fp32"
    one = estimate(method="full", full={"update": "backward"}, optim={"max_grad_norm": None})
    assert one.gradients_bytes == 4 * 151936 * 4096
    assert estimate(method="full", precision="fp64").weights_bytes == 8 * count
    narrow = estimate()
    assert narrow.adapter_bytes + narrow.gradients_bytes + narrow.optimizer_bytes == 18 * 43646976
    assert estimate(lora={"rank": 32}).adapter_bytes == 2 * narrow.adapter_bytes
    assert estimate(lora={"targets": ["q_proj"]}).adapter_bytes < narrow.adapter_bytes
    assert estimate(lora={"dropout": 0.1}).activations_bytes > narrow.activations_bytes
    assert estimate(lora={"dora": True}).activations_bytes > narrow.activations_bytes


def test_quantized_bases():
    linears = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    rest = SHAPE.num_params - linears
    scales = 36 * (4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096)
    eight, four = estimate(base={"storage": "fp8"}), estimate(base={"storage": "nf4"})
    assert eight.weights_bytes == 2 * rest + linears + 4 * scales
    assert four.weights_bytes == pytest.approx(2 * rest + linears * 0.515869140625, rel=1e-9)
    # one group's weights in bf16 for nf4, its transposed fp8 bytes for fp8: gate and up are the largest
    group, few_labels = 2 * 4096 * 12288, MicroBatchSize(16384, 100, 32)
    plain, eight, four = (
        estimate(base={"storage": name}, size=few_labels).working_bytes for name in ("model", "fp8", "nf4")
    )
    assert (eight - plain, four - plain) == (group, 2 * group)


def test_the_head_holds_one_tile():
    short = make_shape(QWEN3_8B | {"num_hidden_layers": 1})

    def working(num_label_tokens):
        return estimate(shape=short, size=MicroBatchSize(100, num_label_tokens, 1)).working_bytes

    # logits, and the label rows with their gradient; from the second tile on only the label rows grow
    assert working(2048) - working(1024) == 1024 * (151936 * 2 + 2 * 4096 * 2)
    assert working(2049) - working(2048) == 2 * 4096 * 2
    assert working(9000) - working(8000) == 1000 * 2 * 4096 * 2


def test_total_is_the_sum_of_its_parts():
    whole = estimate()
    parts = (whole.weights_bytes, whole.adapter_bytes, whole.gradients_bytes, whole.optimizer_bytes)
    assert whole.total_bytes == sum(parts) + whole.activations_bytes + whole.working_bytes
