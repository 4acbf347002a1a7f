"""Recorded decoder passes give the losses and gradients of plain ones, for any documents of a recorded size."""

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, save_tiny_model

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.models.compile.cuda_graphs import GraphedDecoder
from flatout.models.compile.layers import CompileOptions, compile_layers
from flatout.models.load.model import load_model
from flatout.models.lora.fused import fuse_layers
from flatout.models.lora.layer import add_lora, lora_layers, trainable_parameters
from flatout.models.packed import PackedSize, flatten_samples, packed_size, padded_num_boundaries
from flatout.models.packed_loss import packed_loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SHAPE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "max_position_embeddings": 4096}
LADDER = (1024, 1152)
LENGTHS = [[700, 31, 290], [512, 300, 150, 50, 5, 1], [1000], [900, 130]]


def batch_of(lengths, num_boundaries):
    draw = np.random.default_rng(sum(lengths))
    documents = [(draw.integers(3, VOCAB_SIZE, length), draw.random(length) < 0.6) for length in lengths]
    return flatten_samples(documents, num_boundaries=num_boundaries, size_buckets=LADDER).to(torch.device("cuda"))


@pytest.fixture
def trained(tmp_path):
    torch._dynamo.reset()
    save_tiny_model(tmp_path, "qwen3", **SHAPE)
    loaded = load_model(
        ModelConfig(name=str(tmp_path), precision="bf16"), method="lora", device=torch.device("cuda"), seed=0
    )
    add_lora(loaded.model, LoraConfig(rank=8), seed=0)
    for layer in lora_layers(loaded.model).values():
        layer.lora_b.data.normal_(0, 0.1)
    fuse_layers(loaded.model)
    num_boundaries = padded_num_boundaries(8)
    assert compile_layers(loaded, "auto", CompileOptions(num_boundaries=num_boundaries)).is_complete
    parameters = list(trainable_parameters(loaded.model).values())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return loaded.model, parameters, num_boundaries


def gradients_of(model, parameters, batch, decoder=None):
    for parameter in parameters:
        parameter.grad.zero_()
    sums = packed_loss(model, batch, decoder=decoder)
    sums.loss_sum.backward()
    return sums.loss_sum.item(), torch.cat([parameter.grad.flatten() for parameter in parameters])


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
    packed_loss(model, batch, decoder=decoder).loss_sum.backward()
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
