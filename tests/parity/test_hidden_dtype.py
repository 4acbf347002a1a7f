"""full.hidden_states: model. Hidden states between layers take the compute dtype, weights and gradients stay fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_tiny_model
from usual import usual

from flatout.config.schema import FullConfig, ModelConfig
from flatout.errors import UsageError
from flatout.models.blocks import decoder_layers
from flatout.models.compile.recompute import apply_recompute
from flatout.models.load.model import LoadedModel, Loading, load_model
from flatout.models.lora.layer import freeze
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import flatten_samples
from flatout.models.selftest import check_packing


def load(folder: Path, kind: str, hidden_states: Any, precision: Any, rows: bool = False) -> LoadedModel:
    if not folder.exists():
        save_tiny_model(folder, kind)
    config = ModelConfig(name=str(folder), precision=precision)
    full = FullConfig(hidden_states=hidden_states)
    return load_model(config, method="full", device=torch.device("cpu"), seed=0, full=full, how=Loading(is_padded=rows))


def pass_of(loaded: LoadedModel) -> tuple[float, torch.Tensor, set[torch.dtype]]:
    """The loss, all gradients, and the dtypes of what layers get; without dropout."""
    loaded.model.eval()
    seen = set()

    def record(module: Any, args: Any, kwargs: Any) -> None:
        seen.add((args[0] if args else kwargs["hidden_states"]).dtype)

    for layer in decoder_layers(loaded.model):
        layer.register_forward_pre_hook(record, with_kwargs=True)
    samples = [(np.arange(length) % 50, np.ones(length, bool)) for length in (9, 20)]
    batch = flatten_samples(samples, row_length=24 if loaded.is_padded else None)
    with torch.autocast("cpu", dtype=loaded.dtype, enabled=loaded.autocast):
        loss = packed_cross_entropy(loaded.model, batch).loss_sum
    loss.backward()
    grads = [parameter.grad for parameter in loaded.model.parameters() if parameter.grad is not None]
    assert {grad.dtype for grad in grads} == {next(loaded.model.parameters()).dtype}
    return loss.item(), torch.cat([grad.double().flatten() for grad in grads]), seen


# the last two return fp32 themselves: by the experts' input after a norm, by a norm after attention and MLP
KINDS = [(kind, rows) for kind in ("qwen3", "gpt2", "gemma3_text", "qwen3_moe", "exaone4") for rows in (False, True)]


@pytest.mark.parametrize(("kind", "rows"), usual(KINDS, KINDS[::3]))
def test_only_the_hidden_states_are_narrower(tmp_path, kind, rows):
    wide = load(tmp_path / "model", kind, "fp32", "bf16", rows)
    narrow = load(tmp_path / "model", kind, "model", "bf16", rows)
    assert "hidden states between layers are bfloat16" in narrow.report
    assert "no leak" in check_packing(narrow)
    loss, grads, dtypes = pass_of(wide)
    narrow_loss, narrow_grads, narrow_dtypes = pass_of(narrow)
    assert (dtypes, narrow_dtypes) == ({torch.float32}, {torch.bfloat16})
    assert narrow_loss == pytest.approx(loss, rel=1e-2)
    assert torch.nn.functional.cosine_similarity(grads, narrow_grads, dim=0) > 0.99


@pytest.mark.parametrize("precision", usual(["fp32", "fp64"], ["fp32"]))
def test_it_changes_nothing_where_weights_are_as_narrow_and_says_so(tmp_path, precision):
    wide = pass_of(load(tmp_path / "model", "qwen3", "fp32", precision))
    loaded = load(tmp_path / "model", "qwen3", "model", precision)
    assert any("hidden_states: model has no effect, as the weights are float" in line for line in loaded.report)
    narrow = pass_of(loaded)
    assert wide[0] == narrow[0]
    assert torch.equal(wide[1], narrow[1])


def test_fp16_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"needs model\.precision bf16; got fp16"):
        load(tmp_path / "model", "qwen3", "model", "fp16")


@pytest.mark.parametrize("kind", usual(["qwen3", "exaone4"], ["exaone4"]))
def test_compiled_layers_get_and_return_the_same(tmp_path, kind):
    loaded = load(tmp_path / "model", kind, "model", "bf16")
    loss, grads, _ = pass_of(loaded)
    loaded.model.zero_grad()
    runs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *args: runs.append(1) or graph(*args)

    # the sdpa form's loop over documents is no graph, so only the MLPs and norms around it are
    for layer in decoder_layers(loaded.model):
        layer.compile(dynamic=True, backend=backend)
    compiled_loss, compiled_grads, dtypes = pass_of(loaded)
    torch._dynamo.reset()
    assert runs
    assert dtypes == {torch.bfloat16}
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    assert torch.nn.functional.cosine_similarity(grads, compiled_grads, dim=0) > 0.9999


@pytest.mark.parametrize("level", ["full", "offload"])
def test_recomputed_layers_get_the_same_dtype(tmp_path, level):
    """Offload replaces a frozen embedding by one on the host."""
    save_tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    kept = load(tmp_path / "model", "qwen3", "model", "bf16")
    freeze(kept.model, ["embed_tokens"])
    loss, grads, _ = pass_of(kept)
    loaded = load(tmp_path / "model", "qwen3", "model", "bf16")
    freeze(loaded.model, ["embed_tokens"])
    assert apply_recompute(loaded.model, level) == (level == "offload")
    loaded.model.train()
    again_loss, again_grads, dtypes = pass_of(loaded)
    assert dtypes == {torch.bfloat16}
    assert again_loss == loss
    assert torch.equal(grads, again_grads)
