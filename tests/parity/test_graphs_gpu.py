"""Recorded decoder passes give the losses and gradients of plain ones, for any documents of a recorded size."""

import json

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, save_tiny_model

from flatout.config.schema import ExpertsConfig, LoraConfig, ModelConfig
from flatout.models.auxiliary_loss import StepFacts
from flatout.models.compile import layers
from flatout.models.compile.cuda_graphs import GraphedDecoder
from flatout.models.compile.layers import CompileOptions, compile_layers
from flatout.models.compile.recompute import apply_recompute, compiling_with
from flatout.models.experts.router import Routers
from flatout.models.load.model import load_model
from flatout.models.lora.fused import fuse_layers
from flatout.models.lora.layer import add_lora, lora_layers, trainable_parameters
from flatout.models.model_with_loss import ModelWithLoss, packed_cross_entropy
from flatout.models.packed import PackedSize, flatten_samples, packed_size, padded_num_boundaries
from flatout.track.callback import MemoryCallback
from flatout.trainer.run import train

pytestmark = pytest.mark.gpu
SHAPE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "max_position_embeddings": 4096}
EXPERTS = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 64},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
}
LADDER = (1024, 1152)
LENGTHS = [[700, 31, 290], [512, 300, 150, 50, 5, 1], [1000], [900, 130]]


def batch_of(lengths, num_boundaries):
    draw = np.random.default_rng(sum(lengths))
    documents = [(draw.integers(3, VOCAB_SIZE, length), draw.random(length) < 0.6) for length in lengths]
    return flatten_samples(documents, num_boundaries=num_boundaries, size_buckets=LADDER).to(torch.device("cuda"))


def make_trained(folder, family, experts=None, recompute="none"):
    """A compiled model with its trained parameters, and its loss with the routers', which their hooks precede."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    save_tiny_model(folder, family, **SHAPE, **EXPERTS.get(family, {}))
    loaded = load_model(
        ModelConfig(name=str(folder), precision="bf16"), method="lora", device=torch.device("cuda"), seed=0
    )
    targets = ["all-linear", *(["experts"] if family in EXPERTS else [])]
    add_lora(loaded.model, LoraConfig(rank=8, targets=targets), seed=0)
    for layer in lora_layers(loaded.model).values():
        layer.lora_b.data.normal_(0, 0.1)
    fuse_layers(loaded.model)
    apply_recompute(loaded.model, recompute)
    num_boundaries = padded_num_boundaries(8)
    loss = ModelWithLoss(loaded.model)
    if experts is not None:
        loss.aux_loss = Routers(loaded.model, experts)
    with compiling_with(recompute):
        outcome = compile_layers(loaded, "auto", CompileOptions(num_boundaries=num_boundaries), loss)
    assert outcome.is_complete, outcome.line
    parameters = list(trainable_parameters(loaded.model).values())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return loss, parameters, num_boundaries


@pytest.fixture
def trained(tmp_path, request, monkeypatch):
    # with random weights a bf16 gradient of gpt-oss is at 0.92 to 0.97 of its fp32 one, compiled or not
    monkeypatch.setitem(layers._SMALLEST_COSINE, torch.bfloat16, 0.9)
    family, _, recompute = getattr(request, "param", "qwen3").partition("/")
    level = int(recompute) if recompute.isdecimal() else recompute or "none"
    loss, parameters, num_boundaries = make_trained(tmp_path, family, recompute=level)
    return loss.model, parameters, num_boundaries


def gradients_of(model, parameters, batch, decoder=None):
    for parameter in parameters:
        parameter.grad.zero_()
    sums = packed_cross_entropy(model, batch, decoder=decoder)
    sums.loss_sum.backward()
    return sums.loss_sum.item(), torch.cat([parameter.grad.flatten() for parameter in parameters])


@pytest.mark.parametrize("trained", ["qwen3", "qwen3/budget", "qwen3/1", "qwen3/full", *EXPERTS], indirect=True)
def test_replays_equal_plain_passes(trained):
    model, parameters, num_boundaries = trained
    decoder = GraphedDecoder(model, parameters, [parameter.grad for parameter in parameters])
    sizes = sorted({packed_size(lengths, size_buckets=LADDER) for lengths in LENGTHS}, reverse=True)
    assert decoder.record(sizes, num_boundaries) == len(sizes)
    assert not any(parameter.grad.any() for parameter in parameters)
    for lengths in [*LENGTHS, *LENGTHS[::-1]]:
        batch = batch_of(lengths, num_boundaries)
        assert PackedSize(batch.num_tokens, batch.max_seqlen) in decoder._recorded
        loss, truth = gradients_of(model, parameters, batch)
        replayed_loss, replayed = gradients_of(model, parameters, batch, decoder)
        assert replayed_loss == pytest.approx(loss, rel=1e-5)
        # atomics of the attention's backward make two plain passes differ as well
        assert torch.nn.functional.cosine_similarity(truth, replayed, dim=0) > 0.9999


@pytest.mark.parametrize("losses", [{}, {"balance_loss": 30.0, "z_loss": 1.0}])
def test_replays_have_the_losses_and_loads_of_routers(tmp_path, losses):
    """Choices are read after each replay, and the losses' gradients of logits go back into it."""
    loss, parameters, num_boundaries = make_trained(tmp_path, "qwen3_moe", ExpertsConfig(**losses))
    model, routers = loss.model, loss.aux_loss
    assert routers.layers
    decoder = GraphedDecoder(model, parameters, [parameter.grad for parameter in parameters], loss.aux_loss)
    sizes = sorted({packed_size(lengths, size_buckets=LADDER) for lengths in LENGTHS}, reverse=True)
    assert decoder.record(sizes, num_boundaries) == len(sizes)
    for index, lengths in enumerate([*LENGTHS, *LENGTHS[::-1]]):
        batch, found = batch_of(lengths, num_boundaries), {}
        for how in (None, decoder):
            loss.decoder = how
            for parameter in parameters:
                parameter.grad.zero_()
            routers.start_step(StepFacts(2 * index + (how is not None), sum(lengths), 1e3, model.device, lambda x: x))
            loss_sum, *_ = loss(batch)
            (loss_sum / 1e3).backward()
            gradient = torch.cat([parameter.grad.flatten() for parameter in parameters])
            found[how] = loss_sum.item(), routers.sums, gradient
        (one_loss, sums, gradient), (other_loss, other_sums, other) = found.values()
        assert other_loss == pytest.approx(one_loss, rel=1e-5)
        assert torch.equal(sums[2:], other_sums[2:])
        assert sums[2:].sum() == sum(lengths) * 2 * len(routers.layers)
        assert bool(sums[:2].all()) == bool(losses)
        assert other_sums[:2].tolist() == pytest.approx(sums[:2].tolist(), rel=1e-5)
        assert torch.nn.functional.cosine_similarity(gradient, other, dim=0) > 0.9999
        assert other.norm().item() == pytest.approx(gradient.norm().item(), rel=1e-2)


@pytest.mark.parametrize("balance_loss", [0.0, 0.01])
def test_a_run_with_experts_is_recorded_and_stays_the_same(tiny, tmp_path, balance_loss):
    save_tiny_model(tmp_path / "model", "qwen3_moe", **SHAPE, **EXPERTS["qwen3_moe"], vocab_size=512)
    for file in (*tiny.model_dir.glob("*token*"), *tiny.model_dir.glob("chat_template*")):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())

    class Told(MemoryCallback):
        line = ""

        def on_stage(self, name, text):
            self.line = text if name == "graphs" else self.line

    found = {}
    for graphs in ("off", "auto"):
        torch._dynamo.reset()
        told = Told()
        config = tiny.config(
            tmp_path / graphs,
            device="cuda",
            cuda_graphs=graphs,
            model={"name": str(tmp_path / "model"), "precision": "bf16"},
            lora={"rank": 8, "targets": ["all-linear", "experts"]},
            experts={"balance_loss": balance_loss},
            batch={"samples_per_step": 6, "micro_batch_tokens": 700, "max_steps": 8},
        )
        train(config, callbacks=[told])
        assert told.line.startswith("off: as configured") if graphs == "off" else "sizes recorded" in told.line
        lines = map(json.loads, (tmp_path / graphs / "metrics.jsonl").read_text().splitlines())
        found[graphs] = [line for line in lines if line["kind"] == "step"]
    # padded to a recorded size, a product may be another kernel with another rounding
    for one, other in zip(found["off"], found["auto"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=5e-3)
        assert other["expert_peak_load"] == pytest.approx(one["expert_peak_load"], rel=0.1)
        if balance_loss:
            assert other["balance_loss"] == pytest.approx(one["balance_loss"], rel=2e-2)


@pytest.mark.parametrize("trained", ["qwen3", "qwen3_moe"], indirect=True)
def test_recordings_need_the_memory_of_one_pass(trained):
    model, parameters, num_boundaries = trained
    decoder = GraphedDecoder(model, parameters, [parameter.grad for parameter in parameters])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    assert decoder.record([PackedSize(count, 4096) for count in (32768, 30720, 28672)], num_boundaries) == 3
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved() - before
    assert kept > 2**26
    assert torch.cuda.max_memory_reserved() - before < 1.3 * kept


def test_gradients_add_up_over_replays(trained):
    model, parameters, num_boundaries = trained
    decoder = GraphedDecoder(model, parameters, [parameter.grad for parameter in parameters])
    decoder.record([packed_size(LENGTHS[0], size_buckets=LADDER)], num_boundaries)
    batch = batch_of(LENGTHS[0], num_boundaries)
    _, once = gradients_of(model, parameters, batch, decoder)
    packed_cross_entropy(model, batch, decoder=decoder).loss_sum.backward()
    twice = torch.cat([parameter.grad.flatten() for parameter in parameters])
    assert ((twice - 2 * once).norm() / once.norm()).item() < 1e-2


def test_other_sizes_run_without(trained):
    model, parameters, num_boundaries = trained
    decoder = GraphedDecoder(model, parameters, [parameter.grad for parameter in parameters])
    batch = batch_of([77, 5], num_boundaries)
    loss, truth = gradients_of(model, parameters, batch)
    same_loss, same = gradients_of(model, parameters, batch, decoder)
    assert same_loss == pytest.approx(loss, rel=1e-5)
    assert torch.nn.functional.cosine_similarity(truth, same, dim=0) > 0.9999
