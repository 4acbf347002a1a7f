"""Hybrids packed: masked tokens keep convolutions apart, kernels that know the boundaries keep recurrences apart."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from model_table import LENGTHS, documents, gradients, plain_loss, tiny
from transformers import AutoModelForCausalLM
from usual import usual

from flatout.config.schema import ExpertsConfig, ModelConfig
from flatout.errors import UsageError
from flatout.models.arch_quirks import choose_layout, packed_hybrid
from flatout.models.auxiliary_loss import StepFacts
from flatout.models.blocks import replace_module
from flatout.models.compile.regions import Regions
from flatout.models.experts.router import Routers
from flatout.models.load.model import LoadedModel, Loading, load_model
from flatout.models.model_with_loss import ModelWithLoss, packed_cross_entropy
from flatout.models.packed import flatten_samples, padded_num_boundaries
from flatout.models.selftest import check_packing

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
CONVOLUTIONS = ["lfm2", "lfm2_moe", "lfm3"]
# by the packages that their recurrences need
RECURRENT = {
    "qwen3_5_text": ("fla",), "qwen3_next": ("fla",), "olmo_hybrid": ("fla",),
    "bamba": ("mamba_ssm", "causal_conv1d"), "granitemoehybrid": ("mamba_ssm", "causal_conv1d"),
}  # fmt: skip


def load(folder: Path, model_type: str, device: torch.device, precision: Any, rows: bool = False) -> LoadedModel:
    tiny(model_type).save_pretrained(folder)
    config = ModelConfig(name=str(folder), init="random", precision=precision)
    loaded = load_model(config, method="full", device=device, seed=0, how=Loading(is_padded=rows))
    loaded.model.eval()
    return loaded


NUM_BOUNDARIES = [None, padded_num_boundaries(len(LENGTHS))]


@pytest.mark.parametrize("num_boundaries", NUM_BOUNDARIES)
@pytest.mark.parametrize("model_type", usual(CONVOLUTIONS, ["lfm2_moe"]))
def test_convolutions_pack_exactly_without_a_kernel(tmp_path, model_type, num_boundaries):
    loaded = load(tmp_path, model_type, CPU, "fp64")
    assert choose_layout(loaded.model.config, "auto").layout == "packed"
    assert "packed = alone within 0.0e+00" in check_packing(loaded)
    ours = packed_cross_entropy(loaded.model, flatten_samples(documents(), num_boundaries=num_boundaries)).loss_sum
    ours_grad = gradients(loaded.model, ours)
    truth = plain_loss(loaded.model)
    assert ours.item() == pytest.approx(truth.item(), rel=1e-12)
    assert float((ours_grad - gradients(loaded.model, truth)).norm() / ours_grad.norm()) < 1e-12


class PassThrough(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


ROUTED = ["lfm2_moe", "qwen3_next", "nemotron_h", "qwen3_5_moe_text", "granitemoehybrid"]


@pytest.mark.parametrize("num_boundaries", usual(NUM_BOUNDARIES, NUM_BOUNDARIES[1:]))
@pytest.mark.parametrize("model_type", usual(ROUTED, ROUTED[:3]))
def test_routers_of_packed_hybrids_count_tokens_without_padding(tmp_path, model_type, num_boundaries, monkeypatch):
    """Their layers also see the masked tokens between documents, which belong to no sample."""
    monkeypatch.setattr("flatout.models.arch_quirks.find_spec", lambda package: True)
    loaded = load(tmp_path, model_type, CPU, "fp32")
    recurrences = re.compile("GatedDeltaNet$|Mamba.*Mixer$|MambaLayer$")
    for path, module in list(loaded.model.named_modules()):
        if recurrences.search(type(module).__name__):
            # its kernel, which only runs on a GPU, has no part in counting
            replace_module(loaded.model, path, PassThrough())
    loss = ModelWithLoss(loaded.model)
    routers = Routers(loaded.model, ExpertsConfig(balance_loss=0.1, z_loss=0.1))
    loss.aux_loss = routers
    chosen: list[torch.Tensor] = []
    for router in routers.layers:
        router.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    batch = flatten_samples(documents(), num_boundaries=num_boundaries)
    spread, rows = batch.spread(packed_hybrid(loaded.model.config.get_text_config())[0])
    assert spread.num_tokens > batch.num_tokens
    routers.start_step(StepFacts(0, sum(LENGTHS), 1.0, CPU, lambda values: values))
    loss(batch)[0].backward()
    loads, _ = routers.loads(routers.sums)
    assert len(chosen) == len(routers.layers) > 0
    for layer, choices in enumerate(chosen):
        own = choices.view(spread.num_tokens, -1)[rows][: sum(LENGTHS)]
        counts = torch.bincount(own.flatten(), minlength=routers.num_experts).double()
        assert loads[layer].tolist() == pytest.approx((counts / counts.mean()).tolist())


@pytest.mark.parametrize("model_type", RECURRENT)
def test_a_recurrence_without_its_kernel_takes_rows_and_says_what_to_install(model_type):
    if all(map(find_spec, RECURRENT[model_type])):
        pytest.skip("its kernels are installed")
    choice = choose_layout(tiny(model_type), "auto")
    assert choice.layout == "rows"
    assert "without " in choice.reason
    with pytest.raises(UsageError, match=r"without (flash-linear-attention|mamba-ssm)"):
        choose_layout(tiny(model_type), "packed")


def test_kernels_that_refuse_a_backward_pass_are_found_at_the_start(tmp_path):
    loaded = load(tmp_path, "qwen3_5_text", CPU, "fp32", rows=True)
    assert "rows = alone" in check_packing(loaded)

    def refuse(grad: torch.Tensor) -> None:
        raise RuntimeError("install another compiler\nas this one is wrong")

    def refuse_gradients(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(refuse)

    norm = next(module for module in loaded.model.modules() if type(module).__name__.endswith("RMSNorm"))
    norm.register_forward_hook(refuse_gradients)
    with pytest.raises(UsageError, match=r"recurrent layers cannot be trained .*: install another compiler$"):
        check_packing(loaded)


LOOPS = ["jamba", "kimi_linear", "qwen3_next", "falcon_mamba", "mamba", "qwen3_5_text", "qwen4_exp_text", "zamba"]


@pytest.mark.parametrize("model_type", usual(LOOPS, LOOPS[:3]))
def test_no_graph_contains_a_loop_over_tokens(model_type, monkeypatch):
    if find_spec("fla") and model_type.startswith("qwen3"):
        pytest.skip("its kernels are installed")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny(model_type))
    compiled: dict[torch.nn.Module, bool] = {}
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda part, disable=False, **_: compiled.update({part: not disable})
    )
    regions = Regions(model)
    regions.compile()
    assert regions.split
    parts = [part for layer in regions.split for part in layer.children() if compiled.get(part)]
    whole = [layer for layer in regions.layers if layer not in regions.split and compiled[layer]]
    assert parts
    assert not [part for one in (*parts, *whole) for part in one.modules() if isinstance(part, torch.nn.Conv1d)]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", RECURRENT)
def test_packed_equals_rows_equals_one_by_one_on_a_gpu(tmp_path, model_type, precision, monkeypatch):
    for package in RECURRENT[model_type]:
        pytest.importorskip(package)
    # kernels want heads of at least 16, and fp32 products without TF32
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    monkeypatch.setitem(__import__("model_table").CHANGES, "qwen3_5_text", {"linear_key_head_dim": 32})
    loaded = load(tmp_path, model_type, CUDA, precision)
    try:
        assert "no leak between documents" in check_packing(loaded)
    except UsageError as error:
        # fla refuses a Triton with which it computes wrong gradients on this GPU
        if "with the packages installed here" in str(error):
            pytest.skip(str(error))
        raise
    rows = load(tmp_path, model_type, CUDA, precision, rows=True)
    with torch.autocast("cuda", dtype=loaded.dtype, enabled=loaded.autocast):
        packed = packed_cross_entropy(loaded.model, flatten_samples(documents()).to(CUDA)).loss_sum
        padded = packed_cross_entropy(
            rows.model, flatten_samples(documents(), row_length=max(LENGTHS)).to(CUDA)
        ).loss_sum
    limit = {"fp32": 1e-4, "bf16": 2e-2}[precision]
    assert packed.item() == pytest.approx(padded.item(), rel=limit)
    packed_grad, padded_grad = gradients(loaded.model, packed), gradients(rows.model, padded)
    assert float((packed_grad - padded_grad).norm() / padded_grad.norm()) < 10 * limit
