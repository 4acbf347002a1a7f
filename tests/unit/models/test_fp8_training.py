import pytest
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from flatout.errors import ResourceError, UsageError
from flatout.models import trained_fp8
from flatout.models.trained_fp8 import TrainedFp8Linear, convert_to_float8, fitting_linears

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16,
}  # fmt: skip


def test_linears_of_other_widths_and_the_head_stay():
    model = AutoModelForCausalLM.from_config(Qwen3Config(**{**SHAPE, "num_hidden_layers": 5}, intermediate_size=40))
    fitting, num_others = fitting_linears(model)
    inner = list(model.model.layers)[1:-1]
    assert num_others == 3 * 3 + 2 * 7
    assert fitting == {getattr(layer.self_attn, f"{name}_proj") for layer in inner for name in ("q", "k", "v", "o")}
    assert model.get_output_embeddings() not in fitting


def test_routers_stay():
    model = AutoModelForCausalLM.from_config(Qwen3Config(**{**SHAPE, "num_hidden_layers": 3}, intermediate_size=48))
    before = len(fitting_linears(model)[0])
    model.model.layers[1].mlp.gate = nn.Linear(32, 16)
    fitting, _ = fitting_linears(model)
    assert len(fitting) == before == 7
    assert model.model.layers[1].mlp.gate not in fitting


@pytest.mark.parametrize("num_layers", [1, 2])
def test_no_layer_between_the_first_and_the_last_is_refused(monkeypatch, num_layers):
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(**{**SHAPE, "num_hidden_layers": num_layers}, intermediate_size=48)
    )
    monkeypatch.setattr(trained_fp8, "has_fp8", lambda device: True)
    with pytest.raises(UsageError, match="between the first and the last decoder layer; this model has none"):
        convert_to_float8(model, "fp8_rowwise", compile_mode="auto", shards=False)


def test_rowwise_layers_keep_their_parameters_and_names(monkeypatch):
    model = AutoModelForCausalLM.from_config(Qwen3Config(**{**SHAPE, "num_hidden_layers": 3}, intermediate_size=48))
    before = {name: (id(parameter), parameter.clone()) for name, parameter in model.named_parameters()}
    monkeypatch.setattr(trained_fp8, "has_fp8", lambda device: True)
    line = convert_to_float8(model, "fp8_rowwise", compile_mode="auto", shards=False)
    assert line.startswith("7 linear layers compute in fp8, one scale per row; 14 do not")
    assert [type(layer.mlp.up_proj) for layer in model.model.layers] == [nn.Linear, TrainedFp8Linear, nn.Linear]
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == {
        name: address for name, (address, _) in before.items()
    }
    assert all(parameter.equal(before[name][1]) for name, parameter in model.named_parameters())


def test_refusals_name_the_way_out():
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE, intermediate_size=48))
    with pytest.raises(UsageError, match="with compile=off") as refused:
        convert_to_float8(model, "fp8", compile_mode="off", shards=False)
    assert [fix.settings for fix in refused.value.fixes] == [{"compile": "auto"}, {"full.compute": "model"}]
    with pytest.raises(ResourceError, match=r"capability 8\.9 or newer") as without:
        convert_to_float8(model, "fp8", compile_mode="auto", shards=False)
    assert without.value.fixes[0].settings == {"full.compute": "model"}
