"""Quantized loading: one dense layer at a time, equal to the dequantized model, bitsandbytes files as they are."""

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model, tiny_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from usual import every, usual

from flatout.config.schema import BaseConfig, ModelConfig
from flatout.errors import CheckpointError, UsageError
from flatout.kernels.nf4.reference import nf4_levels, quantize
from flatout.models.blocks import decoder_layers
from flatout.models.export import save_model
from flatout.models.frozen.frozen_experts import Nf4Experts
from flatout.models.frozen.frozen_linear import Nf4Linear
from flatout.models.load.inference import load_for_inference
from flatout.models.load.model import Loading, load_model
from flatout.models.load.quantized import Quantizer, quantize_layers, random_quantized
from flatout.models.selftest import check_packing

CPU = torch.device("cpu")
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8",
}


def load(folder, storage="nf4", method="lora", precision="fp32", **settings):
    base = BaseConfig(storage=storage)
    config = ModelConfig(name=str(folder), precision=precision, **settings)
    return load_model(config, method=method, device=CPU, seed=settings.pop("seed", 0), base=base)


def linear_names(model):
    inside = {module for layer in decoder_layers(model) for module in layer.modules() if type(module) is nn.Linear}
    return [name for name, module in model.named_modules() if module in inside]


def bits(tensor):
    """Codes may be a NaN's, which is equal to nothing."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def dequantized(model):
    """The dense model that the quantized one stands for."""
    for name in linear_names(model):
        weight = model.get_submodule(name).weight
        weight.data.copy_(Nf4Linear.from_dense(weight, None).weight)
    for parameter in model.parameters():
        if parameter.dim() == 3:
            parameter.data.copy_(Nf4Experts(parameter).weight)
    return model


def logits(model):
    model.eval().set_attn_implementation("eager")
    with torch.no_grad():
        return model(torch.arange(3, 25).view(2, 11)).logits


class CountingLayer(nn.Module):
    """Stands for a quantized layer; counts how many dense weights live when one is made."""

    alive: list[StorageWeakRef]
    most = 0
    made: list[tuple[torch.Size, torch.dtype, bool]]

    @classmethod
    def make(cls, weight, bias):
        cls.alive = [*(ref for ref in cls.alive if not ref.expired()), StorageWeakRef(weight.untyped_storage())]
        cls.most = max(cls.most, len(cls.alive))
        cls.made.append((weight.shape, weight.dtype, bias is not None))
        return cls()


@pytest.fixture
def recorder():
    CountingLayer.alive, CountingLayer.most, CountingLayer.made = [], 0, []
    return CountingLayer


SHARDS = [("llama", "60KB"), ("qwen3_moe", "5GB"), ("qwen3", "5GB"), ("gemma2", "5GB")]


@pytest.mark.parametrize(("family", "shards"), usual(SHARDS, SHARDS[:2]))
def test_equals_the_dequantized_model(tmp_path, family, shards):
    model = tiny_model(family, torch.float32, hidden_size=64)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    loaded = load(tmp_path)
    stored = [module for module in loaded.model.modules() if isinstance(module, Nf4Linear)]
    assert len(stored) == len(linear_names(model))
    assert "no leak" in check_packing(loaded)
    difference = logits(loaded.model) - logits(dequantized(model))
    # grouped products add a token's experts in another order
    assert float(difference.abs().max()) <= (1e-5 if family == "qwen3_moe" else 0.0)
    assert type(loaded.model.get_output_embeddings()) is nn.Linear
    assert not [name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad]
    tied = loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight
    assert tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def test_report_counts_all_weights_and_names_slow_rows(tmp_path):
    model = save_tiny_model(tmp_path, "llama", hidden_size=64)
    first, *_, stored, slow = load(tmp_path).report
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters" in first
    assert stored.startswith("base nf4: 14 linear layers of")
    # o_proj reads 32 values a row, down_proj 48
    assert slow.startswith("4 layers")


def test_one_dense_weight_at_a_time(tmp_path, recorder):
    model = tiny_model("qwen2", torch.float32)
    names = linear_names(model)
    embedding = model.get_input_embeddings().weight
    expected = [
        (linear.weight.shape, torch.bfloat16, linear.bias is not None) for linear in map(model.get_submodule, names)
    ]
    quantize_layers(model, Quantizer(recorder.make, Nf4Experts), device=CPU, dtype=torch.bfloat16, place=CPU)
    assert recorder.made == expected
    assert recorder.most == 1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight is embedding
    assert model.get_decoder().rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["nf4", "fp8"])
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_gpu_never_holds_the_dense_model(tmp_path, init, storage):
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24, "head_dim": 128}
    model = save_tiny_model(tmp_path, "llama", torch.bfloat16, **shape)
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    config, base = ModelConfig(name=str(tmp_path), init=init), BaseConfig(storage=storage)
    loaded = load_model(config, method="lora", device=device, seed=0, base=base)
    kept = torch.cuda.memory_allocated() - before
    dense = sum(parameter.nbytes for parameter in model.parameters())
    assert kept < dense * (0.3 if storage == "nf4" else 0.55)
    # quantizing one weight takes a few fp32 copies of it, a layer at most its dense form
    assert torch.cuda.max_memory_allocated() - before < kept + dense * 0.25
    assert "no leak" in check_packing(loaded)


def test_random_weights_are_made_layer_by_layer(recorder):
    model = tiny_model("llama", num_hidden_layers=5)
    options = {"dtype": torch.bfloat16}
    random_quantized(model.config, options, Quantizer(recorder.make, Nf4Experts), device=CPU, place=CPU, seed=0)
    assert len(recorder.made) == len(linear_names(model)) == 35
    assert {dtype for _, dtype, _ in recorder.made} == {torch.bfloat16}
    assert recorder.most == 7


@pytest.mark.parametrize("family", usual(["llama", "gemma3_text", "gpt_neox", "qwen3_moe"], ["gpt_neox", "qwen3_moe"]))
def test_random_weights_depend_on_the_seed_alone(tmp_path, family):
    save_tiny_model(tmp_path, family)
    before = torch.get_rng_state()
    config, base = ModelConfig(name=str(tmp_path), init="random", precision="fp32"), BaseConfig(storage="nf4")
    first, second, other = (
        load_model(config, method="lora", device=CPU, seed=seed, base=base).model.state_dict() for seed in (5, 5, 6)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(bits(first[name]), bits(second[name])) for name in first)
    assert any(not torch.equal(bits(first[name]), bits(other[name])) for name in first if name.endswith("packed"))
    dense = load_model(config, method="lora", device=CPU, seed=5).model.state_dict()
    # what is no draw must be what transformers starts with
    for name in set(dense) & set(first):
        if dense[name].std() == 0:
            assert torch.equal(first[name], dense[name]), name


FP4_LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_mxfp4(weight):
    """Blocks of 32 inputs of an expert's weight (E, in, out) as E2M1 with one E8M0 scale; the values they stand for."""
    rows = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().floor() - 2
    codes = (rows[..., None] / exponent[..., None].exp2() - FP4_LEVELS).abs().argmin(-1)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    values = (FP4_LEVELS[codes] * exponent.exp2()).flatten(-2).transpose(1, 2)
    return {"_blocks": blocks, "_scales": (exponent[..., 0] + 127).to(torch.uint8)}, values


def in_fp8(weight, size=16):
    """Blocks of size x size weights as E4M3 with one fp32 scale; the values they stand for."""
    blocks = weight.float().unflatten(1, (-1, size)).unflatten(0, (-1, size))
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (codes.float() * scales[:, None, :, None]).flatten(2).flatten(0, 1)
    return {"": codes.flatten(2).flatten(0, 1), "_scale_inv": scales}, values


def write_dequantizable(folder, family, method):
    """A tiny model in a quantized format; returns the tensors that it stands for."""
    shape = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    shape |= {"num_experts": 4, "moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    save_tiny_model(folder, family, torch.bfloat16, **shape)
    tensors = load_file(folder / "model.safetensors")
    dense = dict(tensors)
    for name in list(tensors):
        of_experts = ".experts." in name and not name.endswith("_bias")
        if of_experts if method == "mxfp4" else name.endswith("_proj.weight"):
            parts, values = (in_mxfp4 if method == "mxfp4" else in_fp8)(tensors.pop(name))
            tensors |= {name + suffix: tensor.contiguous() for suffix, tensor in parts.items()}
            dense[name] = values
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {"mxfp4": {"modules_to_not_convert": ["lm_head"]}, "fp8": {"weight_block_size": [16, 16]}}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **fields[method]}
    (folder / "config.json").write_text(json.dumps(config))
    return dense


READ = [
    (*files, *training)
    for training in (("lora", False), ("full", False), ("lora", True))
    for files in (("gpt_oss", "mxfp4"), ("qwen3_moe", "fp8"), ("qwen3", "fp8"))
]


@pytest.mark.parametrize(("family", "method", "training", "on_host"), every(4, READ))
def test_quantized_files_are_read_as_the_weights_they_stand_for(tmp_path, family, method, training, on_host):
    dense = write_dequantizable(tmp_path, family, method)
    config = ModelConfig(name=str(tmp_path), precision="fp32")
    loaded = load_model(config, method=training, device=CPU, seed=0, how=Loading(on_host=on_host))
    assert f"the files' {method} weights are dequantized" in loaded.report
    assert type(loaded.model) is type(tiny_model(family))
    if not on_host:
        assert "no leak" in check_packing(loaded)
    save_model(loaded.model, None, tmp_path / "saved")
    # a plain model, with the names of one that was never quantized
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == dense.keys()
    for name, values in dense.items():
        # on the host weights keep the files' dtype
        torch.testing.assert_close(saved[name], values.to(saved[name].dtype), rtol=0, atol=0)


def test_quantized_files_become_a_random_model_or_another_storage(tmp_path):
    write_dequantizable(tmp_path, "qwen3", "fp8")
    random = load(tmp_path, storage="model", init="random")
    assert not any("dequantized" in line for line in random.report)
    assert any(type(module) is Nf4Linear for module in load(tmp_path).model.modules())
    inference = load_for_inference(str(tmp_path), device=CPU)
    assert {parameter.dtype for parameter in inference.parameters()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="has gptq weights, which are not supported"):
        load(tmp_path)


def write_nf4(folder, model, *, skip=(), config=None, state=None, change=None):
    """What bitsandbytes saves: each linear layer of the decoder as bytes, maps and a JSON of the rest."""
    folder.mkdir(exist_ok=True)
    model.config.quantization_config = {**NF4, **(config or {})}
    model.config.save_pretrained(folder)
    del model.config.quantization_config
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name in linear_names(model):
        if name.endswith(tuple(skip) or "nothing"):
            continue
        weight = tensors.pop(name + ".weight")
        stored = quantize(weight)
        facts = {
            "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape),
            "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": stored.offset.item(), **(state or {}),
        }  # fmt: skip
        tensors[name + ".weight"] = stored.packed[:, None]
        tensors[name + ".weight.absmax"] = stored.absmax
        tensors[name + ".weight.quant_map"] = nf4_levels(CPU)
        tensors[name + ".weight.nested_absmax"] = stored.nested_absmax
        tensors[name + ".weight.nested_quant_map"] = stored.nested_map.clone()
        text = json.dumps(facts).encode()
        tensors[name + ".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    if change:
        change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


WRITTEN = [
    (family, skip)
    for family in ("llama", "qwen2", "qwen3", "gemma3_text")
    for skip in ((), ("o_proj", "0.mlp.up_proj"))
]


@pytest.mark.parametrize(("family", "skip"), every(3, WRITTEN))
def test_bitsandbytes_files_are_read_as_they_are(tmp_path, family, skip):
    model = tiny_model(family, torch.float32, hidden_size=64)
    write_nf4(tmp_path, model, skip=skip)
    loaded = load(tmp_path)
    names = [name for name in linear_names(model) if not name.endswith(tuple(skip) or "nothing")]
    for name in names:
        ours, theirs = loaded.model.get_submodule(name), quantize(model.get_submodule(name).weight)
        assert all(torch.equal(one, other) for one, other in zip(ours.stored, theirs, strict=True))
        weight = model.get_submodule(name).weight
        weight.data.copy_(ours.weight)
    assert sum(isinstance(module, Nf4Linear) for module in loaded.model.modules()) == len(names)
    assert "no leak" in check_packing(loaded)
    assert torch.equal(logits(loaded.model), logits(model))


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_nf4_files_need_the_memory_of_one_dense_layer(tmp_path, monkeypatch, init):
    """Counted over all modules alive whenever a quantized one is made, whoever holds them."""
    model = tiny_model("llama", torch.float32, hidden_size=64, num_hidden_layers=12)
    write_nf4(tmp_path, model)
    sizes = {model.get_submodule(name).weight.shape for name in linear_names(model)}
    most, make, make_linear, linears = 0, Nf4Linear.__init__, nn.Linear.__init__, weakref.WeakSet()

    def noted(self, *args, **settings):
        make_linear(self, *args, **settings)
        linears.add(self)

    def counted(self, *args, **settings):
        nonlocal most
        alive = [one for one in linears if type(one) is nn.Linear and not one.weight.is_meta]
        most = max(most, sum(one.weight.numel() for one in alive if one.weight.shape in sizes))
        make(self, *args, **settings)

    monkeypatch.setattr(nn.Linear, "__init__", noted)
    monkeypatch.setattr(Nf4Linear, "__init__", counted)
    loaded = load(tmp_path, init=init)
    assert sum(isinstance(module, Nf4Linear) for module in loaded.model.modules()) == 12 * 7
    one_layer = sum(model.get_submodule(name).weight.numel() for name in linear_names(model)) // 12
    assert 0 < most <= one_layer


def test_bitsandbytes_files_need_nf4_storage(tmp_path):
    write_nf4(tmp_path, tiny_model("llama", torch.float32))
    for storage, method in (("fp8", "lora"), ("model", "lora"), ("model", "full")):
        with pytest.raises(UsageError, match=r"base\.storage=nf4"):
            load(tmp_path, storage, method)
    with pytest.raises(UsageError, match=r"base\.storage=nf4"):
        load_for_inference(str(tmp_path), device=CPU)


OTHERS = [
    ({"bnb_4bit_use_double_quant": False}, "bnb_4bit_use_double_quant: False"),
    ({"quant_method": "gptq", "bits": 4}, "gptq"),
    ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type: fp4"),
    ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage: bfloat16"),
    ({"load_in_4bit": False, "load_in_8bit": True}, "int8"),
]


@pytest.mark.parametrize(("config", "message"), usual(OTHERS, OTHERS[:2]))
def test_other_quantizers_are_refused_by_name(tmp_path, config, message):
    write_nf4(tmp_path, tiny_model("llama", torch.float32), config=config)
    with pytest.raises(UsageError, match=message):
        load(tmp_path)


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "state", "error", "message"),
    [
        (lambda t: t.pop(NAME + ".nested_absmax"), {}, CheckpointError, "nested_absmax is missing"),
        (lambda t: t.pop("model.norm.weight"), {}, CheckpointError, r"1 weights are missing .*model\.norm\.weight"),
        (lambda t: t.update({"extra.weight": torch.ones(2)}), {}, CheckpointError, r"1 are unknown.*extra\.weight"),
        (lambda t: t.update({NAME + ".quant_map": torch.ones(16)}), {}, CheckpointError, "not NF4's"),
        (None, {"blocksize": 128}, CheckpointError, r"\(128, 256"),
        (None, {"shape": [8, 8]}, CheckpointError, r"\(8, 8\)"),
        (
            lambda t: t.update({"lm_head.weight.quant_state.bitsandbytes__nf4": torch.ones(4).byte()}),
            {},
            UsageError,
            "lm_head is quantized but is not a linear layer",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, change, state, error, message):
    write_nf4(tmp_path, tiny_model("llama", torch.float32), change=change, state=state)
    with pytest.raises(error, match=message):
        load(tmp_path)
