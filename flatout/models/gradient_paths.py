"""Which trained parameters no gradient can reach: torch and transformers leave these as they are, weight decay too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.models.load.model import LoadedModel
from flatout.models.lora.layer import trainable_parameters
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import PackedBatch
from flatout.models.probe import MAX_LONG_TOKENS, PROBE_LENGTHS, evaluating, random_batch


def unreached_parameters(loaded: LoadedModel, *, longest: int, seen: PackedBatch | None = None) -> list[str]:
    """Return the names of trained parameters that no gradient of the loss can reach, such as those of an indexer.

    The graph of a forward pass of short documents shows them, and where it shows any, that of a document of `longest`
    tokens, the run's longest, or 16,384, and of a batch with pictures, `seen`. Their saved tensors are dropped, so that
    they take an evaluation's memory. Experts
    that no token of the pass chose count as reached. A model whose weights are in files shows its first layers, which
    stand for the others.
    """
    with loaded.present():
        unreached = _unreached(loaded, PROBE_LENGTHS)
        if unreached and longest > max(PROBE_LENGTHS):
            unreached &= _unreached(loaded, (min(longest, MAX_LONG_TOKENS), 8))
        if unreached and seen is not None:
            unreached &= _unreached(loaded, seen)
        reached = {_kind(name) for name in trainable_parameters(loaded.model).keys() - unreached}
    kinds = {_kind(name) for name in unreached} - reached if loaded.deferred_weights is not None else set()
    return [name for name in trainable_parameters(loaded.model) if name in unreached or _kind(name) in kinds]


def freeze_named(model: nn.Module, names: Sequence[str]) -> str | None:
    """Freeze these parameters; return a line for the console, None if there are none.

    Raises UsageError if nothing is left to train.
    """
    if not names:
        return None
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    kinds = sorted({_kind(name) for name in names})
    if not trainable_parameters(model):
        raise UsageError(f"nothing is left to train: no gradient reaches {', '.join(kinds[:3])}; train other layers")
    return f"{len(names)} parameters stay as they are, as no gradient reaches them: {', '.join(kinds)}"


def _kind(name: str) -> str:
    """Return a parameter's name without the index of its layer."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _unreached(loaded: LoadedModel, documents: Sequence[int] | PackedBatch) -> set[str]:
    """Return the trained parameters that are not in the graph of a pass over a batch, or documents of these lengths."""
    model, called = loaded.model, set[nn.Module]()
    if isinstance(documents, PackedBatch):
        batch = documents.to(model.device)
    else:
        batch = random_batch(model, documents, row_length=max(documents) if loaded.is_padded else None)
    dropped = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda _: torch.empty(0))
    with ExitStack() as hooks, evaluating(model), torch.enable_grad(), dropped, loaded.casting():
        for module in model.modules():
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                hooks.enter_context(module.register_forward_pre_hook(lambda module, _: called.add(module)))
        loss = packed_cross_entropy(model, batch).loss_sum
    leaves = _leaves(loss)
    owners = dict(model.named_modules())
    return {
        name
        for name, parameter in trainable_parameters(model).items()
        if parameter not in leaves and not ("expert" in name and owners[name.rpartition(".")[0]] not in called)
    }


def _leaves(loss: Tensor) -> set[Tensor]:
    leaves: set[Tensor] = set()
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.add(variable)
        waiting += [next_node for next_node, _ in node.next_functions]
    return leaves
