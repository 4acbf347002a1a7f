"""Loading: dtypes, random weights by seed, the report, what is refused by name."""

import pytest
import torch
from tiny_models import save_tiny_model, tiny_config

from flatout.config.schema import ModelConfig
from flatout.errors import UsageError
from flatout.kernels.capability import choose_kernels_of
from flatout.models import attention
from flatout.models.arch_quirks import choose_layout, logits_scale
from flatout.models.blocks import decoder_layers
from flatout.models.load.model import load_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model(path, "llama")
    return path


def load(folder, method="lora", seed=0, **settings):
    return load_model(ModelConfig(name=str(folder), **settings), method=method, device=CPU, seed=seed)


@pytest.mark.parametrize(
    ("method", "precision", "weights", "compute"),
    [
        ("lora", "auto", torch.float32, torch.float32),
        ("lora", "bf16", torch.bfloat16, torch.bfloat16),
        ("lora", "fp16", torch.float16, torch.float16),
        ("lora", "fp64", torch.float64, torch.float64),
        ("full", "bf16", torch.float32, torch.bfloat16),
        ("full", "fp64", torch.float64, torch.float64),
    ],
)
def test_dtypes(folder, method, precision, weights, compute):
    loaded = load(folder, method, precision=precision)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {weights}
    assert loaded.dtype == compute
    assert loaded.autocast == (weights != compute)
    assert {parameter.requires_grad for parameter in loaded.model.parameters()} == {method == "full"}
    assert "llama" in loaded.report[0]
    assert loaded.report[1].startswith("attention sdpa")


def test_random_weights_depend_on_the_seed_alone(folder):
    before = torch.get_rng_state()
    first, second, other = (load(folder, init="random", seed=seed).model.state_dict() for seed in (5, 5, 6))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_random_weights_need_only_a_config(tmp_path):
    tiny_config("qwen3").save_pretrained(tmp_path)
    model = load(tmp_path, init="random").model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert len(decoder_layers(model)) == 2


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "jamba"])
def test_hybrids_are_refused_by_name(family):
    from transformers import CONFIG_MAPPING

    with pytest.raises(UsageError, match=f"model type {family} cannot be trained on packed documents"):
        choose_layout(CONFIG_MAPPING[family](), "packed")


def test_unknown_hybrids_are_refused_by_their_layers():
    config = tiny_config("llama")
    config.model_type, config.layer_types = "llama_next", ["full_attention", "linear_attention"]
    with pytest.raises(UsageError, match="linear_attention layers carry state"):
        choose_layout(config, "packed")
    assert choose_layout(config, "auto").layout == "rows"
    assert choose_layout(tiny_config("llama"), "auto").layout == "packed"
    assert choose_layout(tiny_config("llama"), "rows") == ("rows", "as configured")


def choice(wanted, device=CUDA, dtype=torch.bfloat16, model_type="llama", **fields):
    config = tiny_config("llama", **fields)
    config.model_type = model_type
    return attention.choose_attention(wanted, config, device=device, dtype=dtype).implementation


@pytest.fixture
def hopper():
    """Kernels are chosen as on a Hopper GPU, without one."""
    choose_kernels_of((9, 0))
    yield
    choose_kernels_of(None)


@pytest.mark.usefixtures("hopper")
def test_attention_is_chosen_from_the_config(monkeypatch):
    for problem in ("flash_problem", "cudnn_problem"):
        monkeypatch.setattr(attention, problem, lambda *_: "the package is not installed")
    assert choice("auto") == "varlen"
    assert choice("auto", CPU) == "sdpa"
    assert choice("auto", dtype=torch.float32) == "sdpa"
    assert choice("auto", head_dim=512) == "sdpa"
    assert choice("auto", attention_dropout=0.1) == "sdpa"
    assert choice("auto", attn_logit_softcapping=50.0) == "plain"
    assert choice("auto", model_type="gpt_oss") == "varlen"
    assert choice("auto", CPU, model_type="gpt_oss") == "sdpa"
    assert choice("plain") == "plain"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("wanted", "device", "fields", "message"),
    [
        ("varlen", CPU, {}, "needs CUDA"),
        ("varlen", CUDA, {"attn_logit_softcapping": 50.0}, "soft-capped"),
        ("sdpa", CPU, {"attn_logit_softcapping": 50.0}, "soft-capped"),
        ("varlen", CUDA, {"attention_dropout": 0.1}, "dropout"),
    ],
)
def test_attention_asked_for_by_name_is_never_swapped_silently(wanted, device, fields, message):
    with pytest.raises(UsageError, match=message):
        choice(wanted, device, **fields)


def test_logit_scales():
    assert logits_scale(tiny_config("llama")) == 1.0
    assert logits_scale(tiny_config("granite", logits_scaling=4.0)) == 0.25
    assert logits_scale(tiny_config("cohere", logit_scale=0.5)) == 0.5
