"""Regional compilation: each decoder layer as one graph, one compile for all layers, dynamic in tokens."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from flatout.models.blocks import decoder_layers
from flatout.models.head import packed_loss
from flatout.models.load import LoadedModel
from flatout.models.lora import trainable_parameters
from flatout.models.packed import PackedBatch, pack
from flatout.models.selftest import has_experts

# two sizes, so that the graph is dynamic in tokens and documents before the first step
_WARM_UP_LENGTHS = ((200, 31, 150), (700, 300, 129, 16, 5))
_SMALLEST_COSINE = {torch.bfloat16: 0.99, torch.float16: 0.99, torch.float32: 0.99999}


def compile_layers(loaded: LoadedModel, mode: Literal["auto", "off"]) -> str:
    """Compile every decoder layer, run two small batches through it, and compare gradients with eager ones.

    Returns a line for the console: what was done, or why nothing was. Off on the CPU, in fp64 and for experts, whose
    routing is no static graph. A layer that cannot be compiled, or whose compiled gradients differ, runs eagerly, and
    the line says so. Random state, gradients and weights are left as found.
    """
    model = loaded.model
    if (why := _reason_against(loaded, mode)) is not None:
        return f"off: {why}"
    batches = [_batch(model, lengths) for lengths in _WARM_UP_LENGTHS]
    eager = [_gradient(loaded, batch) for batch in batches]
    for layer in decoder_layers(model):
        layer.compile(fullgraph=True, dynamic=True)
    try:
        compiled = [_gradient(loaded, batch) for batch in batches]
    except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
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
    if loaded.dtype not in _SMALLEST_COSINE:
        return f"not in {loaded.dtype}"
    if has_experts(loaded.model):
        return "expert routing is no static graph"
    if loaded.attention != "varlen":
        return f"attention {loaded.attention} reads the documents' borders on the host"
    return None


def _batch(model: PreTrainedModel, lengths: tuple[int, ...]) -> PackedBatch:
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    draw = np.random.default_rng(0)
    documents = [(draw.integers(0, num_embeddings, length), np.ones(length, bool)) for length in lengths]
    return pack(documents, for_kernels=True).to(model.device)


def _gradient(loaded: LoadedModel, batch: PackedBatch) -> torch.Tensor:
    """All gradients of one batch's loss as one fp32 vector; dropout off, so that the two can be compared."""
    model = loaded.model
    parameters = list(trainable_parameters(model).values())
    was_training = model.training
    model.eval()
    with torch.autocast(model.device.type, dtype=loaded.dtype, enabled=loaded.autocast):
        loss = packed_loss(model, batch).loss_sum / batch.num_label_tokens
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    model.train(was_training)
    return torch.cat([gradient.float().flatten() for gradient in gradients if gradient is not None])
