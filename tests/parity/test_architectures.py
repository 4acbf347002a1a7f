"""Every causal language model of the installed transformers trains exactly, or is refused in one sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_table import documents, tiny
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from usual import usual

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.errors import UsageError
from flatout.models.load.model import load_model
from flatout.models.lora.fused import fuse_layers
from flatout.models.lora.layer import add_lora
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import flatten_samples
from flatout.models.rope import plain_rope
from flatout.models.selftest import check_packing
from flatout.trainer.model_shape import make_shape, read_shape

CPU = torch.device("cpu")
# what people use, and one of each way to differ or to be refused
TRAINED = (
    "llama", "qwen3_moe", "gemma2", "gemma3n_text", "gemma4_text", "gpt_oss", "granite_swa", "hunyuan_v1_moe",
    "llama4_text", "mimo_v2_flash", "modernbert-decoder", "opt", "phimoe",
)  # fmt: skip
REFUSED = {
    "falcon": "attention interface",
    "recurrent_gemma": "recurrent or convolution state",
    "mpt": "fails on packed documents",
    "stablelm": "without document boundaries",
}
# too large, or random in themselves, whatever the configuration
_LEFT_OUT = {"blt", "reformer"}


def plain_loss(model: PreTrainedModel) -> torch.Tensor:
    """Summed loss by transformers' own attention, one document at a time."""
    for name in ("sdpa", "eager"):
        try:
            model.set_attn_implementation(name)
        except ValueError:
            continue
        break
    total = torch.zeros((), dtype=model.dtype)
    with plain_rope(model):
        for ids, loss_mask in documents():
            tokens = torch.from_numpy(ids)
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            losses = F.cross_entropy(logits[:-1], tokens[1:], reduction="none")
            total = total + losses[torch.from_numpy(loss_mask)[1:]].sum()
    return total


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def train_a_step(folder: Path, method: Any, precision: Any) -> None:
    """Plan, load, prove, and compare loss and gradients with plain transformers. Raises UsageError where refused."""
    assert read_shape(str(folder), None).num_params > 0
    loaded = load_model(
        ModelConfig(name=str(folder), init="random", precision=precision), method=method, device=CPU, seed=0
    )
    check_packing(loaded)
    model = loaded.model.eval()
    if method == "lora":
        add_lora(model, LoraConfig(rank=2), seed=0)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                torch.nn.init.normal_(parameter.data, std=0.02)
        fuse_layers(model)
    ours = packed_cross_entropy(model, flatten_samples(documents())).loss_sum
    ours_grad = gradients(model, ours)
    truth = plain_loss(model)
    # transformers' eager attention takes its softmax in float32, and rotary's cosines are float32 everywhere
    limit = {"fp64": 1e-6, "fp32": 1e-5}[precision]
    assert ours.item() == pytest.approx(truth.item(), rel=limit)
    assert float((ours_grad - gradients(model, truth)).norm() / ours_grad.norm()) < 10 * limit


def write(model_type: str, folder: Path) -> Path:
    tiny(model_type).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", usual(["full", "lora"], ["lora"]))
@pytest.mark.parametrize("model_type", usual(TRAINED, ["llama", "gemma3n_text", "gpt_oss", "modernbert-decoder"]))
def test_trains_a_step_as_plain_transformers_does(tmp_path, model_type, method):
    train_a_step(write(model_type, tmp_path), method, "fp32")


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_exact_is_refused_in_one_sentence(tmp_path, model_type):
    with pytest.raises(UsageError, match=REFUSED[model_type]) as refused:
        train_a_step(write(model_type, tmp_path), "full", "fp32")
    assert len(refused.value.text.splitlines()) == 1


def test_heads_that_differ_by_layer_are_planned_as_the_largest(tmp_path):
    assert read_shape(str(write("gemma4_text", tmp_path)), None).head_dim == 16


def test_other_names_of_sizes_are_transformers_own():
    shape = make_shape({"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4})
    assert (shape.num_layers, shape.hidden_size, shape.num_heads) == (3, 64, 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - _LEFT_OUT))
def test_every_architecture_trains_or_is_refused(tmp_path, model_type):
    try:
        write(model_type, tmp_path)
    except Exception as error:  # noqa: BLE001  (configurations check themselves with any exception)
        pytest.skip(f"no small configuration: {error}")
    for method in ("full", "lora"):
        try:
            train_a_step(tmp_path, method, "fp64")
            said = "trained"
        except UsageError as refused:
            said = str(refused)
        assert len(said.splitlines()) == 1
