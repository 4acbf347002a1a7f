import pytest
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from flatout.errors import ResourceError, UsageError
from flatout.models.bases.fp8_training import convert_to_float8, fitting_linears

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16,
}  # fmt: skip


def test_linears_of_other_widths_and_the_head_stay() -> None:
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE, intermediate_size=40))
    fitting, num_others = fitting_linears(model)
    assert num_others == 2 * 3
    assert len(fitting) == 2 * 4
    assert model.get_output_embeddings() not in fitting
    assert {type(module) for module in fitting} == {nn.Linear}


def test_refusals_name_the_way_out() -> None:
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE, intermediate_size=48))
    with pytest.raises(UsageError, match="got compile: off"):
        convert_to_float8(model, compile_mode="off")
    with pytest.raises(ResourceError, match=r"capability 8\.9 or newer; use full\.compute: model"):
        convert_to_float8(model, compile_mode="auto")
