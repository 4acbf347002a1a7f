"""Losses on routers: equal to transformers' for one micro-batch, and the same however a step is split or padded."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from test_experts import FAMILIES, error, experts_model
from tiny_models import tiny_samples
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
from usual import usual

from flatout.config.schema import ExpertsConfig, ModelConfig
from flatout.errors import UsageError
from flatout.models.auxiliary_loss import StepFacts
from flatout.models.blocks import hidden_states
from flatout.models.experts.block import prepare_experts
from flatout.models.experts.router import Routers, find_routers
from flatout.models.load.model import load_model
from flatout.models.model_with_loss import ModelWithLoss, observe_layers
from flatout.models.packed import PackedBatch, flatten_samples

SAMPLES = tiny_samples([11, 7, 5, 9])
NUM_TOKENS = 32


def loaded_model(family: str, folder: Path) -> Any:
    experts_model(family, torch.float64).save_pretrained(folder)
    config = ModelConfig(name=str(folder), precision="fp64", attention="plain")
    return load_model(config, method="full", device=torch.device("cpu"), seed=0).model


def step_gradients(
    model: Any,
    config: ExpertsConfig,
    parts: list[Any],
    sum_values: Any = lambda values: values,
    replays: bool = False,
    **padding: Any,
) -> dict[str, Tensor]:
    """The gradients of one step of these micro-batches, with its routers' losses and loads.

    `replays`: passes are computed as recorded ones are, whose routers' logits and choices are copies at other places.
    """
    loss: Any = ModelWithLoss(model)
    routers = Routers(model, config)
    loss.aux_loss = routers

    def replay(batch: PackedBatch) -> Tensor:
        states, outputs = hidden_states(model, batch), loss.aux_loss.graph_outputs()
        loss.aux_loss.end_pass()
        loss.aux_loss.load_graph_outputs([output.clone() for output in outputs])
        return states

    loss.decoder = replay if replays else None
    model.zero_grad()
    batches = [flatten_samples(part, **padding) for part in parts]
    facts = StepFacts(0, NUM_TOKENS, 19.0, model.device, sum_values)
    routers.start_step(facts)
    if routers.needs_passes(len(batches)):
        with torch.no_grad():
            for batch in batches:
                loss(batch, observe_layers)
        routers.end_passes()
    for batch in batches:
        (loss(batch)[0] / 19).backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {
        **found,
        "losses": routers.sums[:2],
        "counts": routers.sums[2:].view(len(routers.layers), -1).sum(0),
        "loads": routers.loads(routers.sums)[0],
        "entropy": routers.loads(routers.sums)[1],
    }


@pytest.mark.parametrize(
    "family", usual(["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "granitemoe"], ["qwen3_moe", "gpt_oss"])
)
def test_losses_of_one_micro_batch_are_transformers(family, tmp_path):
    model = loaded_model(family, tmp_path)
    found = step_gradients(model, ExpertsConfig(balance_loss=0.3, z_loss=0.02), [SAMPLES])
    logits: list[Tensor] = []
    hooks = [one.register_forward_hook(lambda _, __, out: logits.append(out[0])) for one in find_routers(model)]
    model.zero_grad()
    cross_entropy = ModelWithLoss(model)(flatten_samples(SAMPLES))[0] / 19
    for hook in hooks:
        hook.remove()
    k = FAMILIES[family]["num_experts_per_tok"]
    balance = load_balancing_loss_func(tuple(logits), logits[0].shape[1], k)
    squares = torch.stack([one.logsumexp(-1).square().mean() for one in logits]).mean()
    (cross_entropy + 0.3 * balance + 0.02 * squares).backward()
    assert found["losses"].tolist() == pytest.approx([balance.item(), squares.item()], rel=1e-6)
    for name, parameter in model.named_parameters():
        # transformers sums the probabilities in float32
        assert parameter.grad is None or error(found[name], parameter.grad) < 1e-6, name


def test_splits_and_padding_change_no_gradient(tmp_path):
    model = loaded_model("qwen3_moe", tmp_path)
    config = ExpertsConfig(balance_loss=0.3, z_loss=0.02)
    whole = step_gradients(model, config, [SAMPLES])
    alone = step_gradients(model, ExpertsConfig(), [SAMPLES])
    assert error(whole["model.layers.0.mlp.gate.weight"], alone["model.layers.0.mlp.gate.weight"]) > 1e-2
    others = [
        step_gradients(model, config, [SAMPLES[:1], SAMPLES[1:]]),
        step_gradients(model, config, [[sample] for sample in SAMPLES[::-1]]),
        step_gradients(model, config, [SAMPLES], num_boundaries=8),
    ]
    assert flatten_samples(SAMPLES, num_boundaries=8).num_tokens > NUM_TOKENS
    for other in others:
        assert max(error(other[name], whole[name]) for name in whole) < 1e-12


@pytest.mark.parametrize("losses", [{}, {"balance_loss": 0.3}, {"z_loss": 0.02}, {"balance_loss": 0.3, "z_loss": 0.02}])
def test_replayed_passes_have_the_same_losses_and_loads(tmp_path, losses):
    model, config = loaded_model("qwen3_moe", tmp_path), ExpertsConfig(**losses)
    parts = [SAMPLES[:1], SAMPLES[1:]]
    plain, replayed = (step_gradients(model, config, parts, replays=replays) for replays in (False, True))
    assert plain["counts"].sum() > 0
    assert bool(plain["losses"].any()) == bool(losses)
    assert plain.keys() == replayed.keys()
    assert max(error(replayed[name], plain[name]) for name in plain if plain[name].any()) < 1e-14


def test_padding_of_rows_counts_for_nothing(tmp_path):
    model = loaded_model("qwen3_moe", tmp_path)
    config = ExpertsConfig(balance_loss=0.3, z_loss=0.02)
    packed, rows = step_gradients(model, config, [SAMPLES]), step_gradients(model, config, [SAMPLES], row_length=16)
    assert max(error(rows[name], packed[name]) for name in packed) < 1e-12


def test_ranks_balance_by_the_loads_of_all(tmp_path):
    """Two ranks with other samples: the sum of their gradients is that of one process with all."""
    model = loaded_model("qwen3_moe", tmp_path)
    config, parts = ExpertsConfig(balance_loss=0.3, z_loss=0.02), (SAMPLES[:1], SAMPLES[1:])
    whole = step_gradients(model, config, [SAMPLES])
    loads = [step_gradients(model, config, [part])["counts"] for part in parts]
    ranks = [step_gradients(model, config, [part], sum_values=lambda values: sum(loads)) for part in parts]
    for name in (*dict(model.named_parameters()), "losses"):
        if name in whole:
            assert error(ranks[0][name] + ranks[1][name], whole[name]) < 1e-12, name


def test_loads_count_the_choices_of_tokens(tmp_path):
    model = loaded_model("deepseek_v3", tmp_path)
    chosen: list[Tensor] = []
    hooks = [one.register_forward_hook(lambda _, __, out: chosen.append(out[2])) for one in find_routers(model)]
    found = step_gradients(model, ExpertsConfig(), [SAMPLES])
    for hook in hooks:
        hook.remove()
    counts = torch.bincount(chosen[0].flatten(), minlength=8).double()
    shares = counts / counts.sum()
    entropy = -(shares[shares > 0] * shares[shares > 0].log()).sum() / torch.tensor(8.0).log()
    assert found["losses"].tolist() == [0, 0]
    assert found["loads"].flatten().tolist() == pytest.approx((shares * 8).tolist())
    assert found["entropy"].tolist() == pytest.approx([float(entropy)])


def test_defaults_are_transformers(tmp_path):
    model = experts_model("qwen3_moe", torch.float32)
    assert Routers(model, ExpertsConfig()).balance_loss == 0
    model.config.output_router_logits = True
    assert Routers(model, ExpertsConfig()).balance_loss == model.config.router_aux_loss_coef == 0.001
    assert Routers(model, ExpertsConfig(balance_loss=0)).balance_loss == 0
    model.config.output_router_logits = False
    # as TRL, which sets output_router_logits itself
    as_trl = Routers(model, ExpertsConfig.model_validate({"balance_loss": "model"}))
    assert as_trl.balance_loss == 0.001
    assert as_trl.line.endswith("7 experts: balance loss times 0.001")
    assert Routers(model, ExpertsConfig()).line.endswith(
        "no loss on the load; experts.balance_loss: model adds its config's 0.001 times, as TRL does"
    )
    assert Routers(model, ExpertsConfig(balance_loss=0)).line.endswith("no loss on the load")
    with pytest.raises(UsageError, match=r"experts.z_loss: the routers of model type llama4_text are not known"):
        Routers(experts_model("llama4_text", torch.float32), ExpertsConfig(z_loss=0.1))


def test_routers_are_read_in_one_graph():
    model = experts_model("qwen3_moe", torch.float32)
    model.set_experts_implementation("flatout")
    prepare_experts(model)
    routers = Routers(model, ExpertsConfig(balance_loss=0.1))
    blocks = [layer.mlp for layer in model.model.layers]
    torch._dynamo.reset()
    x = torch.randn(1, 17, 32)
    expected = [block(x) for block in blocks]
    counted = [one.flatout_routed[1].clone() for one in routers.layers]
    for block in blocks:
        block.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    blocks[0](torch.randn(1, 33, 32))
    with torch.compiler.set_stance("fail_on_recompile"):
        for block, other, router, choices in zip(blocks, expected, routers.layers, counted, strict=True):
            torch.testing.assert_close(block(x), other)
            assert torch.equal(router.flatout_routed[1], choices)
            (grad,) = torch.autograd.grad(router.flatout_routed[0].logsumexp(-1).sum(), router.weight)
            assert bool(grad.any())


def test_a_repeated_step_keeps_its_counts_and_a_forgotten_one_does_not(tmp_path):
    """Passes that are measured before step 0 have its index, but other samples."""
    model = loaded_model("qwen3_moe", tmp_path)
    loss = ModelWithLoss(model)
    routers = Routers(model, ExpertsConfig(balance_loss=0.1))
    loss.aux_loss = routers

    def start() -> bool:
        routers.start_step(StepFacts(0, NUM_TOKENS, 1.0, torch.device("cpu"), lambda values: values))
        return routers.needs_passes(2)

    assert start()
    loss(flatten_samples(SAMPLES))
    assert not start()
    routers.forget_step()
    assert start()


@pytest.mark.parametrize("how", ["observed", "failed", "added", "without losses"])
def test_no_graph_outlives_its_pass(tmp_path, how):
    """A pass that only observes has gradients on, as training's kernels do; one that fails is repeated."""
    model = loaded_model("qwen3_moe", tmp_path)
    loss = ModelWithLoss(model)
    routers = Routers(model, ExpertsConfig(balance_loss=0.0 if how == "without losses" else 0.1))
    loss.aux_loss = routers
    routers.start_step(StepFacts(0, NUM_TOKENS, 1.0, torch.device("cpu"), lambda values: values))
    kept: list[StorageWeakRef] = []

    def watch(_: Any, __: Any, output: Tensor) -> None:
        kept.append(StorageWeakRef(output.untyped_storage()))

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    # what the gradients of q_proj need
    model.model.layers[0].input_layernorm.register_forward_hook(watch)
    if how == "failed":
        model.model.norm.register_forward_hook(fail)

    def observe(loss: ModelWithLoss, batch: PackedBatch) -> tuple[Tensor]:
        (states,) = observe_layers(loss, batch)
        assert states.grad_fn is not None
        return (states.detach(),)

    batch = flatten_samples(SAMPLES)
    raises = pytest.raises(torch.OutOfMemoryError) if how == "failed" else nullcontext()
    with raises:
        result = loss(batch, observe if how == "observed" else None)
    if how in ("added", "without losses"):
        assert not kept[0].expired()
        result[0].backward()
        del result
    del raises  # it holds the frames of the failed pass
    gc.collect()
    assert [one.expired() for one in kept] == [True]
