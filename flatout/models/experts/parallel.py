"""Expert parallelism: cut a model's fused experts, with their adapters, down to those of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.errors import Fix, UsageError
from flatout.models.collectives import RankGroup
from flatout.models.experts.block import compute_as_group, experts_modules, is_grouped
from flatout.models.experts.lora import ExpertLora, plain_name
from flatout.models.frozen.frozen_experts import FrozenExperts

Slices = dict[str, int]
"""The sliced parameters and buffers by full name, with the dimension that had all experts."""


@torch.no_grad()
def slice_experts(model: PreTrainedModel, group: RankGroup) -> Slices:
    """Keep this rank's E / N consecutive experts of every layer, and compute with the group's from now on.

    Weights, biases, quantized storage and adapters are sliced; meta tensors as well. Raises UsageError for experts that
    our block does not compute, that are trained as a whole beside LoRA, or whose quantized bytes cannot be cut.
    """
    kind, modules = model.config.model_type, experts_modules(model)
    if not modules or not all(map(is_grouped, modules.values())):
        raise UsageError(
            f"experts.parallel: {group.size} needs experts in grouped products, which model type {kind} has not",
            [Fix({"experts.parallel": 1})],
        )
    if trained := next((path for path in modules if "trained" in path.split(".")), None):
        raise UsageError(
            f"lora.modules_to_save: {plain_name(trained)} has experts to share among ranks; name them in lora.targets",
            [Fix({"experts.parallel": 1})],
        )
    slices: Slices = {}
    for path, module in model.named_modules():
        for name, dim in list(_expert_dims(module, group.size)):
            old: Tensor = getattr(module, name)
            new = old.detach().chunk(group.size, dim)[group.rank].clone()
            setattr(module, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
            slices[f"{path}.{name}"] = dim
        if isinstance(module, FrozenExperts):
            module.set_num_experts(module.shape[0] // group.size)
        elif isinstance(module, ExpertLora):
            module.num_experts //= group.size
        elif path in modules:
            compute_as_group(module, group)
    return slices


def _expert_dims(module: nn.Module, num_ranks: int) -> Iterator[tuple[str, int]]:
    if isinstance(module, ExpertLora):
        yield from (("lora_a", 0), ("lora_b", 2))
    elif isinstance(module, FrozenExperts):
        for name in module.sliceable(num_ranks):
            yield name, 0
    elif hasattr(module, "is_transposed"):
        for name, parameter in module.named_parameters(recurse=False):
            if len(parameter) == module.num_experts:
                yield name, 0
