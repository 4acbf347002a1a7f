"""Regional compilation: each decoder layer as one graph, one compile for all layers, dynamic in tokens."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.models.blocks import decoder_layers
from flatout.models.head import packed_loss
from flatout.models.load import LoadedModel
from flatout.models.lora import lora_layers, trainable_parameters
from flatout.models.packed import PackedBatch, pack
from flatout.models.selftest import has_experts

# two sizes, so that the graph is dynamic in tokens and documents before the first step
_WARM_UP_LENGTHS = ((200, 31, 150), (700, 300, 129, 16, 5))
_SMALLEST_COSINE = {torch.bfloat16: 0.99, torch.float16: 0.99, torch.float32: 0.99999}


def compile_layers(loaded: LoadedModel, mode: Literal["auto", "off"], *, num_borders: int | None) -> str:
    """Compile every decoder layer, run two small batches through it, and compare gradients with eager ones.

    `num_borders` is what every batch of the run will have (`kernel_borders`); None on the CPU. Returns a line for the
    console: what was done, or why nothing was. Off on the CPU, in fp64 and for experts, whose routing is no static
    graph. A layer that cannot be compiled, or whose compiled gradients differ, runs eagerly, and the line says so.
    With dropout the comparison is made without it, and the graph with it is compiled as well, so that no step
    compiles anything. Random state, gradients, weights and mode are left as found.
    """
    model = loaded.model
    if (why := _reason_against(loaded, mode)) is not None:
        return f"off: {why}"
    assert num_borders is not None
    was_training = model.training
    with torch.random.fork_rng(devices=[model.device]):
        line = _compile(loaded, num_borders)
    model.train(was_training)
    return line


def _compile(loaded: LoadedModel, num_borders: int) -> str:
    # importing the compiler takes a second, and only runs on a GPU need it
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    model = loaded.model
    batches = [_batch(model, lengths, num_borders) for lengths in _WARM_UP_LENGTHS]
    # a graph belongs to a mode; without dropout both compute the same, so training's own is the one compared
    model.train(not _has_dropout(model))
    eager = [_gradient(loaded, batch) for batch in batches]
    for layer in decoder_layers(model):
        layer.compile(fullgraph=True, dynamic=True)
    try:
        compiled = [_gradient(loaded, batch) for batch in batches]
        if not model.training:
            model.train()
            for batch in batches:
                _gradient(loaded, batch)
    except (TorchDynamoException, InductorError) as error:
        torch.compiler.set_stance("force_eager")
        return f"off: this model's layers do not compile ({str(error).splitlines()[0]})"
    cosine = min(
        torch.nn.functional.cosine_similarity(one, other, dim=0).item()
        for one, other in zip(eager, compiled, strict=True)
    )
    if cosine < _SMALLEST_COSINE[loaded.dtype]:
        torch.compiler.set_stance("force_eager")
        return f"off: compiled gradients differ from eager ones (cosine {cosine:.6f})"
    return f"{len(decoder_layers(model))} layers as one graph; gradients equal eager ones (cosine {cosine:.6f})"


def _reason_against(loaded: LoadedModel, mode: Literal["auto", "off"]) -> str | None:
    if mode == "off":
        return "as asked"
    if loaded.model.device.type != "cuda":
        return "only on CUDA"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic runs use no kernels that are chosen by timing"
    if loaded.dtype not in _SMALLEST_COSINE:
        return f"not in {loaded.dtype}"
    if has_experts(loaded.model):
        return "expert routing is no static graph"
    if loaded.attention != "varlen":
        return f"attention {loaded.attention} reads the documents' borders on the host"
    return None


def _has_dropout(model: PreTrainedModel) -> bool:
    attention = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
    adapters = any(layer.dropout for layer in lora_layers(model).values())
    return bool(attention) or adapters or any(isinstance(m, nn.Dropout) and m.p for m in model.modules())


def _batch(model: PreTrainedModel, lengths: tuple[int, ...], num_borders: int) -> PackedBatch:
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    draw = np.random.default_rng(0)
    documents = [(draw.integers(0, num_embeddings, length), np.ones(length, bool)) for length in lengths]
    return pack(documents, num_borders=num_borders).to(model.device)


def _gradient(loaded: LoadedModel, batch: PackedBatch) -> torch.Tensor:
    """All gradients of one batch's mean loss as one fp32 vector."""
    model = loaded.model
    parameters = list(trainable_parameters(model).values())
    with torch.autocast(model.device.type, dtype=loaded.dtype, enabled=loaded.autocast):
        loss = packed_loss(model, batch).loss_sum / batch.num_label_tokens
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat([gradient.float().flatten() for gradient in gradients if gradient is not None])
