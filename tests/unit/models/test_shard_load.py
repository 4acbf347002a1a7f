"""Weights that wait in their files: the same model as transformers loads, though it was without memory in between."""

import pytest
import torch
from tiny_models import FAMILIES, save_tiny_model
from torch import Tensor
from usual import usual

from flatout.config.schema import BaseConfig, ModelConfig
from flatout.models.blocks import decoder_layers
from flatout.models.load.model import Loading, load_model
from flatout.models.load.sharded import DeferredWeights
from flatout.models.masters import Dither
from flatout.models.selftest import check_packing

CPU = torch.device("cpu")


def halves(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The second half of the first dimension, as a rank's shard."""
    half = len(tensor) // 2
    return tensor[half:], (half, *(0,) * (tensor.ndim - 1))


def whole(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    return tensor, (0,) * tensor.ndim


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("family", usual(sorted(FAMILIES), ["qwen3", "gemma2", "gpt_neox", "qwen3_moe"]))
def test_the_model_is_the_one_that_transformers_loads(tmp_path, family, precision):
    """fp64: wider than the files (fp32); bf16: fp32 masters from bf16 files, so that buffers must not be rounded."""
    save_tiny_model(tmp_path, family, torch.bfloat16 if precision == "bf16" else torch.float32, num_hidden_layers=3)
    config = ModelConfig(name=str(tmp_path), precision=precision)
    expected = load_model(config, method="full", device=CPU, seed=0)
    loaded = load_model(config, method="full", device=CPU, seed=0, how=Loading(on_host=True))
    compute = torch.bfloat16 if precision == "bf16" else None
    Dither(expected.model, compute=compute, seed=5).apply_to(expected.model)
    dither = Dither(loaded.model, compute=compute, seed=5)
    assert bool(dither.dtypes) == (precision == "bf16")
    deferred_weights = DeferredWeights(loaded.model, device=CPU, dtype=expected.model.dtype, dither=dither)
    assert all(parameter.is_meta for parameter in loaded.model.parameters())
    with deferred_weights.first_layers():
        # gemma's kinds of layers alternate over more layers
        assert len(decoder_layers(loaded.model)) == 2 or "gemma" in family
        check_packing(loaded)
    assert all(parameter.is_meta for parameter in loaded.model.parameters())
    deferred_weights.load(whole)
    got, want = loaded.model.state_dict(keep_vars=True), expected.model.state_dict(keep_vars=True)
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
    assert len(list(loaded.model.parameters())) == len(list(expected.model.parameters()))
    buffers = dict(loaded.model.named_buffers())
    for name, buffer in expected.model.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    ids = torch.arange(20)[None]
    with torch.no_grad():
        # packed attention needs boundaries: transformers' own is enough to compare
        for model in (loaded.model, expected.model):
            model.set_attn_implementation("eager")
        assert torch.equal(loaded.model(ids, use_cache=False).logits, expected.model(ids, use_cache=False).logits)


@pytest.mark.parametrize("storage", ["nf4", "fp8"])
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_quantized_weights_wait_as_well(tmp_path, init, storage):
    save_tiny_model(tmp_path, "qwen2", torch.bfloat16, num_hidden_layers=3)
    config, base = ModelConfig(name=str(tmp_path), init=init, precision="fp32"), BaseConfig(storage=storage)
    expected = load_model(config, method="lora", device=CPU, seed=0, base=base).model.state_dict()
    loaded = load_model(config, method="lora", device=CPU, seed=0, base=base, how=Loading(on_host=True))
    deferred_weights = DeferredWeights(loaded.model, device=CPU, dtype=torch.float32)
    assert all(parameter.is_meta for parameter in loaded.model.parameters())
    with deferred_weights.first_layers():
        check_packing(loaded)
    deferred_weights.load(whole)
    got = loaded.model.state_dict()
    assert list(got) == list(expected)
    assert torch.float8_e4m3fn in {tensor.dtype for tensor in got.values()}
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        # codes may be a NaN's bits
        assert torch.equal(got[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


@pytest.mark.gpu
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_a_gpu_holds_one_layer_while_the_others_wait(tmp_path, init):
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24, "head_dim": 128}
    model = save_tiny_model(tmp_path, "llama", torch.bfloat16, **shape)
    num_bytes = sum(parameter.nbytes for parameter in decoder_layers(model)[0].parameters())
    # this attention needs no proof on the GPU, which would take memory of its own
    config, base = ModelConfig(name=str(tmp_path), init=init, attention="sdpa"), BaseConfig(storage="nf4")
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load_model(config, method="lora", device=device, seed=0, base=base, how=Loading(on_host=True))
    # quantizing a weight takes some fp32 copies of it
    assert torch.cuda.max_memory_allocated() - before < 5 * num_bytes
    assert torch.cuda.memory_allocated() - before < num_bytes / 10
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"cpu"}


def test_a_shard_of_masters_starts_where_the_whole_does(tmp_path):
    """With experts cut in two as well: a place depends on the index in the whole weight."""
    save_tiny_model(tmp_path, "qwen3_moe", torch.bfloat16, num_hidden_layers=2)
    config = ModelConfig(name=str(tmp_path), precision="bf16")
    expected = load_model(config, method="full", device=CPU, seed=0).model
    Dither(expected, compute=torch.bfloat16, seed=5).apply_to(expected)
    loaded = load_model(config, method="full", device=CPU, seed=0, how=Loading(on_host=True)).model
    dither = Dither(loaded, compute=torch.bfloat16, seed=5)
    experts = [name for name, held in loaded.named_parameters() if held.dim() == 3]
    assert experts
    assert set(experts) <= set(dither.dtypes)
    deferred_weights = DeferredWeights(loaded, device=CPU, dtype=torch.float32, dither=dither)
    deferred_weights.narrow(dict.fromkeys(experts, 0), 2, 1)
    for name in experts:
        path, _, leaf = name.rpartition(".")
        module = loaded.get_submodule(path)
        held = getattr(module, leaf)
        setattr(module, leaf, torch.nn.Parameter(held[len(held) // 2 :].clone()))
    deferred_weights.load(halves)
    want = dict(expected.named_parameters())
    for name, held in loaded.named_parameters():
        own = want[name][len(want[name]) // 2 :] if name in experts else want[name]
        assert torch.equal(held[len(held) // 2 :], own[len(own) // 2 :]), name
