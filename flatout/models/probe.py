"""Small batches for checks of a model, and how far apart two results are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.errors import Fix, PackingError, first_line
from flatout.models.arch_quirks import num_logits
from flatout.models.blocks import decoder_layers
from flatout.models.context.shard import ContextShard
from flatout.models.experts.lora import num_expert_tensors
from flatout.models.load.model import LoadedModel
from flatout.models.packed import PackedBatch, flatten_samples

# what transformers' own code raises if it cannot handle a batch
MODEL_ERRORS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# layers after which states are compared
_NUM_FIRST = 2
# lengths of probe documents: uneven, and 32 in total, as fp32 cosines differ by one ulp if a length is not a multiple
# of the CPU's SIMD width
PROBE_LENGTHS = (8, 19, 3, 2)
# of a probe that is long, as some layers work from a certain length on; eager attention's memory is quadratic in it
MAX_LONG_TOKENS = 16384


def has_experts(model: PreTrainedModel) -> bool:
    """Whether the model routes tokens to experts."""
    names = (name for layer in decoder_layers(model) for name, _ in layer.named_modules())
    return any("expert" in name for name in names) or any(map(num_expert_tensors, decoder_layers(model)))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Compute without dropout in this context; the model's mode does not change."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def checking(loaded: LoadedModel, failure: type[PackingError], what: str, *fixes: Fix) -> Iterator[None]:
    """Check `what` of a model in its autocast, without dropout; an error of its own code becomes a `failure`."""
    model = loaded.model
    try:
        with evaluating(model), loaded.casting():
            yield
    except torch.OutOfMemoryError:
        raise
    except MODEL_ERRORS as error:
        failed = f"({type(error).__name__}: {first_line(error)})"
        ways = fixes or (Fix({}, "choose a different model"),)
        raise failure(f"model type {model.config.model_type} fails on {what} {failed}", ways) from error


def random_batch(
    model: PreTrainedModel,
    lengths: Sequence[int],
    *,
    num_boundaries: int | None = None,
    num_shared_boundaries: int | None = None,
    row_length: int | None = None,
    shard: ContextShard | None = None,
) -> PackedBatch:
    """Return documents of these lengths on the model's device, all tokens labels; the same at every call.

    With `num_shared_boundaries`, the first two share half of the shorter one, which has no labels. With
    `shard`, the batch is that shard of them.
    """
    # every token is a label, too
    num_tokens = num_logits(model.config.get_text_config()) or model.get_input_embeddings().weight.shape[0]
    token_ids = np.random.default_rng(0).integers(0, num_tokens, sum(lengths))
    documents = [(ids, np.ones(len(ids), bool)) for ids in np.split(token_ids, np.cumsum(lengths)[:-1])]
    if shard is not None:
        return shard.of(flatten_samples(documents), num_boundaries).to(model.device)
    half = min(lengths[:2]) // 2 if num_shared_boundaries and len(lengths) > 1 else 0
    for ids, loss_mask in documents[:2] if half else ():
        ids[:half] = documents[0][0][:half]
        loss_mask[: half + 1] = False
    return flatten_samples(
        documents,
        num_boundaries=num_boundaries,
        row_length=row_length,
        shared=((half, 2),) if half else (),
        num_shared_boundaries=num_shared_boundaries,
    ).to(model.device)


def relative_error(ours: torch.Tensor, truth: torch.Tensor, experts: bool, lengths: Sequence[int]) -> float:
    """Return the relative L2 error: the worst of the documents of these lengths; with experts, the median token.

    Rounding may route a token to another expert, which changes that token a lot and says nothing about packing.
    """
    smallest = torch.finfo(truth.dtype).tiny  # logits of padding's embedding are all zero if no layer has a bias
    if experts:
        return float(((ours - truth).norm(dim=-1) / truth.norm(dim=-1).clamp_min(smallest)).median())
    pairs = zip(ours.split(list(lengths)), truth.split(list(lengths)), strict=True)
    # NaN if any is
    return torch.stack([(mine - true).norm() / true.norm().clamp_min(smallest) for mine, true in pairs]).max().item()


def widened(values: torch.Tensor) -> torch.Tensor:
    """Return values in fp32, or in fp64 if they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@contextmanager
def first_states(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Record the states (T, D) after the first layers in passes of the whole model, which the list then holds.

    Rounding in 16 bit, and in float8 above all, grows with every layer until a comparison says nothing.
    """
    captured: list[torch.Tensor] = []

    def record(module: nn.Module, args: object, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        captured.append(states.flatten(0, -2))

    with decoder_layers(model)[:_NUM_FIRST][-1].register_forward_hook(record):
        yield captured


@contextmanager
def embedded_tokens(model: PreTrainedModel, change: float = 0.0) -> Iterator[list[torch.Tensor]]:
    """Record gradients of passes from the embedded tokens on, which the list then holds.

    With `change`, they are first multiplied at random by 1 - change to 1 + change.
    """
    embedded: list[torch.Tensor] = []

    def keep(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        if change:
            random = torch.rand(output.shape, generator=torch.Generator().manual_seed(1)).to(output.device)
            output = (output.float() * (1 + change * (2 * random - 1))).to(output.dtype)
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    with model.get_input_embeddings().register_forward_hook(keep), torch.enable_grad():
        yield embedded
