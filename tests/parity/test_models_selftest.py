"""The start-up self-test: passes on every supported architecture, refuses planted faults by name."""

import pytest
import torch
from model_table import tiny
from tiny_models import FAMILIES, save_tiny_model, tiny_model
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from usual import usual

from flatout.config.schema import ModelConfig
from flatout.errors import NumericError, UsageError
from flatout.models.attention import registered_name, window_marker
from flatout.models.load.model import LoadedModel, Loading, load_model
from flatout.models.selftest import check_packing, prove_layout

CPU = torch.device("cpu")


def loaded(model, dtype=torch.float64, attention="plain"):
    return LoadedModel(model=model, dtype=dtype, autocast=False, attention=attention, report=())


@pytest.mark.parametrize("precision", usual(["fp64", "fp32", "bf16"], ["fp32"]))
@pytest.mark.parametrize(
    "family", usual([*FAMILIES, "gpt_oss", "granite", "cohere", "olmo2"], ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
)
def test_passes_through_load(tmp_path, family, precision):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "gpt_oss" else {}
    save_tiny_model(tmp_path, family, **experts)
    config = ModelConfig(name=str(tmp_path), precision=precision)
    model = load_model(config, method="lora", device=CPU, seed=0)
    assert model.attention == ("plain" if family == "gemma2" else "sdpa")
    model.model.train()
    assert "no leak" in check_packing(model)
    assert model.model.training
    assert model.model.config._attn_implementation == registered_name(model.attention)


def register(name, function):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, window_marker)


def blind_to_borders(module, query, key, value, mask, scaling=None, **_):
    """The planted fault: one causal mask over all documents."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def test_refuses_a_leak():
    register("blind", blind_to_borders)
    with pytest.raises(UsageError, match=r"model type llama: packed logits differ"):
        check_packing(loaded(tiny_model("llama", attention="blind")))


def test_refuses_a_tiny_leak_that_the_tolerance_would_pass():
    exact = AttentionInterface()["flatout_plain"]

    def leaky(module, query, key, value, mask, **kwargs):
        output, _ = exact(module, query, key, value, mask, **kwargs)
        return output + 1e-6 * value.mean(), None

    register("leaky", leaky)
    with pytest.raises(UsageError, match="changes the logits of another"):
        check_packing(loaded(tiny_model("llama", torch.float32, attention="leaky"), torch.float32))


def test_refuses_nan_that_another_document_causes():
    exact, first = AttentionInterface()["flatout_plain"], []

    def overflows(module, query, key, value, mask, **kwargs):
        output, _ = exact(module, query, key, value, mask, **kwargs)
        first.append(value)
        # other tokens than in the first pass of this layer
        is_changed = not torch.equal(value, first[module.layer_idx])
        return output + (torch.nan if is_changed else 0.0), None

    register("overflows", overflows)
    with pytest.raises(UsageError, match="changes the logits of another by nan"):
        check_packing(loaded(tiny_model("llama", attention="overflows")))


def test_refuses_ignored_sinks():
    exact = AttentionInterface()["flatout_plain"]
    register("no_sinks", lambda *args, s_aux=None, **kwargs: exact(*args, **kwargs))
    model = tiny_model("gpt_oss", torch.float32, attention="no_sinks", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(UsageError, match="model type gpt_oss: packed logits differ"):
        check_packing(loaded(model, torch.float32))


TRANSFORMS = {
    "scale": lambda logits: 0.5 * logits,
    "cap": lambda logits: 30 * torch.tanh(logits / 30),
    "cut": lambda logits: logits[..., :290],
    "bias": lambda logits: logits + torch.arange(300) / 10,
}
HEADS = [(name, dtype) for name in TRANSFORMS for dtype in (torch.float32, torch.float64, torch.bfloat16)]


# a cap changes less than rounding does
@pytest.mark.parametrize(("transform", "dtype"), usual(HEADS, [HEADS[at] for at in (1, 3, 5, 8, 9)]), ids=str)
def test_refuses_a_head_it_does_not_understand(transform, dtype):
    """The logits of a random model are small: a cap of 30 changes its loss by less than rounding does."""
    model = tiny_model("llama", dtype, attention="flatout_plain", initializer_range=0.02)
    check_packing(loaded(model, dtype))
    forward = model.forward

    def transformed(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = TRANSFORMS[transform](output.logits)
        return output

    model.forward = transformed
    with pytest.raises(UsageError, match=r"model type llama (has logits|has \d+ logits, but its head 300)"):
        check_packing(loaded(model, dtype))


@pytest.mark.parametrize(
    "family", usual(["xlstm", "inkling_text", "gemma2", "granite", "cohere"], ["inkling_text", "gemma2", "granite"])
)
def test_understands_the_heads_of_the_table(tmp_path, family):
    """xLSTM caps its logits and Inkling cuts padding off; what the others do has names of their own."""
    config = tiny(family)
    if family == "inkling_text":
        config.unpadded_vocab_size = 290
    config.save_pretrained(tmp_path)
    settings = ModelConfig(name=str(tmp_path), init="random", precision="fp32")
    model = load_model(
        settings, method="full", device=CPU, seed=0, how=Loading(is_padded=family in ("xlstm", "inkling_text"))
    )
    assert "head loss = cross-entropy" in prove_layout(model, longest=16, any_attention=True)[1]


def test_refuses_weights_that_are_not_finite():
    model = tiny_model("llama", attention="flatout_plain")
    nn.init.constant_(model.model.norm.weight, float("nan"))
    with pytest.raises(NumericError, match="not finite"):
        check_packing(loaded(model))
