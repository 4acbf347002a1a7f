"""On a CUDA GPU: models on the kernels of packed attention pass the self-test, compile as one graph a layer, and learn.

cuDNN's kernel comes with the `gpu` extra; torch's (varlen) is tested beside it, since users without the extra get it.
"""

import pytest
import torch
from tiny_models import save_tiny_model, tiny_samples

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.kernels.attention.cudnn import cudnn_problem
from flatout.models.blocks import decoder_layers
from flatout.models.compile.layers import CompileOptions, compile_layers
from flatout.models.compile.recompute import apply_recompute
from flatout.models.load.model import load_model
from flatout.models.lora.layer import add_lora, trainable_parameters
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import flatten_samples, padded_num_boundaries
from flatout.models.selftest import check_packing

pytestmark = pytest.mark.gpu
SHAPE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "initializer_range": 0.05}
CUDA = torch.device("cuda", 0)
ARCHS = ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_neox", "qwen3_moe", "gpt_oss"]


def shape_of(family):
    if family == "qwen3_moe":
        return {"moe_intermediate_size": 64}
    if family == "gpt_oss":
        return {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}
    return {"query_pre_attn_scalar": 64} if family.startswith("gemma") else {}


def load(folder, family="qwen3", method="lora", precision="auto", attention="auto", **shape):
    save_tiny_model(folder, family, **{**SHAPE, **shape_of(family), **shape})
    config = ModelConfig(name=str(folder), precision=precision, attention=attention)
    return load_model(config, method=method, device=CUDA, seed=0)


@pytest.fixture(params=["cudnn", "varlen"])
def kernel(request):
    if request.param == "cudnn" and (problem := cudnn_problem(CUDA)):
        pytest.skip(problem)
    return request.param


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("precision", ["auto", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("family", ARCHS)
def test_self_test_passes_with_the_fastest_attention(tmp_path, family, precision, method):
    loaded = load(tmp_path, family, method, precision)
    fastest = "varlen" if cudnn_problem(CUDA) else "cudnn"
    by_kernel = loaded.dtype.itemsize == 2
    # gemma2's scores are soft-capped, which only the plain form knows
    assert loaded.attention == ("plain" if family == "gemma2" else fastest if by_kernel else "sdpa")
    assert "no leak" in check_packing(loaded)


@pytest.mark.parametrize("precision", ["auto", "fp16"])
@pytest.mark.parametrize("family", [family for family in ARCHS if family != "gemma2"])
def test_self_test_passes_with_torchs_kernel(tmp_path, family, precision):
    loaded = load(tmp_path, family, precision=precision, attention="varlen")
    assert loaded.attention == "varlen"
    assert "no leak" in check_packing(loaded)


def test_layers_compile_as_one_graph(tmp_path, kernel):
    torch._dynamo.reset()
    eager, compiled = (load(tmp_path, attention=kernel) for _ in range(2))
    for loaded in (eager, compiled):
        add_lora(loaded.model, LoraConfig(rank=8), seed=0)
    for layer in decoder_layers(compiled.model):
        layer.compile(fullgraph=True, dynamic=True)
    for lengths in ([5, 300, 1, 90], [64, 200], [17, 33, 250]):
        batch = flatten_samples(tiny_samples(lengths)).to(CUDA)
        gradients = []
        for loaded in (eager, compiled):
            loaded.model.zero_grad()
            sums = packed_cross_entropy(loaded.model, batch)
            sums.loss_sum.backward()
            gradients.append(torch.cat([p.grad.flatten() for p in trainable_parameters(loaded.model).values()]))
        cosine = torch.nn.functional.cosine_similarity(*gradients, dim=0)
        assert float(cosine) > 0.99


@pytest.mark.parametrize("method", ["lora", "full"])
def test_learns_one_batch(tmp_path, method):
    loaded = load(tmp_path, method=method)
    if method == "lora":
        add_lora(loaded.model, LoraConfig(rank=8), seed=0)
    optimizer = torch.optim.AdamW(trainable_parameters(loaded.model).values(), lr=3e-3, fused=True)
    batch = flatten_samples(tiny_samples([5, 120, 1, 60])).to(CUDA)
    losses = []
    for _ in range(30):
        with torch.autocast("cuda", dtype=loaded.dtype, enabled=loaded.autocast):
            sums = packed_cross_entropy(loaded.model, batch)
        optimizer.zero_grad()
        (sums.loss_sum / batch.num_label_tokens).backward()
        optimizer.step()
        losses.append(float(sums.loss_sum.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("largest_pass_tokens", [0, 16384])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3_text"])
def test_compiled_layers_never_recompile(tmp_path, family, method, kernel, largest_pass_tokens):
    """After the warm-up of start-up, steps of any size run the graphs that are there."""
    torch._dynamo.reset()
    loaded = load(tmp_path, family, method, attention=kernel)
    if method == "lora":
        add_lora(loaded.model, LoraConfig(rank=8, dropout=0.1 if family == "qwen3" else 0.0), seed=0)
    options = {"num_boundaries": padded_num_boundaries(100), "largest_pass_tokens": largest_pass_tokens}
    line = compile_layers(loaded, "auto", CompileOptions(**options)).line
    assert "layers as one graph" in line, line
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([5, 300, 1, 90], [64], [17, 33, 250, 900, 4, 5, 6, 7, 8, 9], [2000, 300], [3] * 100, [990] * 9):
            batch = flatten_samples(tiny_samples(lengths), num_boundaries=padded_num_boundaries(100)).to(CUDA)
            with torch.autocast("cuda", dtype=loaded.dtype, enabled=loaded.autocast):
                packed_cross_entropy(loaded.model, batch).loss_sum.backward()


@pytest.mark.parametrize("largest_pass_tokens", [0, 16384])
def test_norms_gradients_of_any_size_are_one_graph(tmp_path, largest_pass_tokens):
    """With 1,024 channels the compiler alone would take another graph from 2,048 tokens on, and from 5,120."""
    torch._dynamo.reset()
    loaded = load(tmp_path, method="full", hidden_size=1024, num_hidden_layers=1)
    options = {"num_boundaries": padded_num_boundaries(20), "largest_pass_tokens": largest_pass_tokens}
    line = compile_layers(loaded, "auto", CompileOptions(**options)).line
    assert "layers as one graph" in line, line
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_documents in (1, 5, 9, 12):
            batch = flatten_samples(tiny_samples([500] * num_documents), num_boundaries=padded_num_boundaries(20)).to(
                CUDA
            )
            with torch.autocast("cuda", dtype=loaded.dtype, enabled=loaded.autocast):
                packed_cross_entropy(loaded.model, batch).loss_sum.backward()


def test_compile_is_off_where_it_cannot_be(tmp_path):
    save_tiny_model(tmp_path, "qwen3_moe", **SHAPE)
    own_loop = ModelConfig(name=str(tmp_path), experts="eager")
    loaded = load_model(own_loop, method="lora", device=CUDA, seed=0)
    assert "expert routing" in compile_layers(loaded, "auto", CompileOptions(num_boundaries=64)).line
    assert compile_layers(loaded, "off", CompileOptions(num_boundaries=64)).line == "off: as configured"


def test_compiled_layers_with_checkpointing_learn(tmp_path):
    torch._dynamo.reset()
    save_tiny_model(tmp_path, "qwen3", **SHAPE)
    loaded = load_model(ModelConfig(name=str(tmp_path)), method="lora", device=CUDA, seed=0)
    apply_recompute(loaded.model, "full")
    add_lora(loaded.model, LoraConfig(rank=8), seed=0)
    assert compile_layers(loaded, "auto", CompileOptions(num_boundaries=64)).is_complete
