"""Create optimizers and their parameter groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from flatout.config.optim import OptimConfig
from flatout.errors import Fix, UsageError
from flatout.optim.flat import FlatOptimizer, flatten
from flatout.optim.options import OptimizerOptions
from flatout.optim.own import make_own
from flatout.optim.update import LR_RATIO

# transformers' rule (Trainer.get_decay_parameter_names): these names, and all of nn.LayerNorm
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def layer_norm_parameters(model: nn.Module) -> set[str]:
    """Return the full names of the parameters of nn.LayerNorm modules, which may have any name (`ln_1.weight`)."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters()
    }


def split_by_decay(names: Iterable[str], layer_norms: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Split names into those with and without weight decay; norms and biases have none, whatever their shape."""
    decayed: list[str] = []
    spared: list[str] = []
    for name in names:
        is_spared = name in layer_norms or _WITHOUT_DECAY.search(name.lower())
        (spared if is_spared else decayed).append(name)
    return decayed, spared


def learns_faster(name: str, parameter: nn.Parameter) -> bool:
    """Whether `optim.lr_ratio` multiplies a trained parameter's learning rate, as PEFT's LoRA+ chooses them."""
    return name.endswith(".lora_b") or parameter.ndim == 1


def make_optimizer(
    named: Mapping[str, nn.Parameter],
    config: OptimConfig,
    *,
    layer_norms: Collection[str] = (),
    seed: int = 0,
    flat: bool = False,
    offset_of: Callable[[Tensor], int] = lambda _: 0,
    matrices: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Create the configured optimizer over the trained parameters, by its row of OPTIMIZERS or a person's own class.

    `layer_norms` are the model's `layer_norm_parameters`, which do not decay, like biases and other norms. `flat` moves
    the parameters of an optimizer that can be flat into one tensor per dtype and decay (`flatten`), so that an update
    is one launch; their gradients must always exist. `seed` is that of random rounding, `offset_of` as in
    `OptimizerOptions`, `matrices` the names of `hidden_matrices`. Raises UsageError for bf16 weights whose updates it
    would lose, and for a class that cannot be used or whose code fails, also later in a step.
    """
    traits = config.traits
    is_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in named.values())
    if is_bf16 and not traits.trains_bf16:
        setting = f"optim.path={config.path}" if config.path else f"optim.name={config.name}"
        settings = {"optim.path": None} if config.path else {}
        raise UsageError(
            f"full.weights: bf16 would lose updates of {setting}", [Fix({**settings, "optim.name": "adamw"})]
        )
    is_flat = flat and traits.is_flat and not is_bf16
    groups: list[dict[str, Any]] = []
    for names, decay in zip(split_by_decay(named, layer_norms), (config.weight_decay, 0.0), strict=True):
        alike: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name in names:
            # one launch cannot update plain tensors, such as slices of experts, together with DTensors
            is_plain = not hasattr(named[name], "to_local")
            is_fast = config.lr_ratio != 1 and learns_faster(name, named[name])
            alike.setdefault((is_plain, is_fast), []).append(named[name])
        for (_, is_fast), parameters in sorted(alike.items(), key=lambda item: item[0]):
            group = {"params": flatten(parameters) if is_flat else parameters, "weight_decay": decay}
            groups.append(group | {LR_RATIO: config.lr_ratio} if is_fast else group)
    if config.path is not None:
        return make_own(groups, config)
    module, _, function = traits.make.partition(".")
    on_gpu = all(parameter.is_cuda for parameter in named.values())
    hidden = frozenset(named[name] for name in matrices if name in named)
    options = OptimizerOptions(seed, is_bf16, is_flat, on_gpu, offset_of, hidden)
    optimizer: torch.optim.Optimizer = getattr(import_module(f"flatout.optim.{module}"), function)(
        groups, config, options
    )
    if isinstance(optimizer, FlatOptimizer):
        optimizer.gradient_views = [(p, p.grad) for p in named.values() if p.grad is not None]
    return optimizer
