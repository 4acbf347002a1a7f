"""Create optimizers and their parameter groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from flatout.config.schema import OptimConfig
from flatout.errors import Fix, UsageError
from flatout.optim.adamw_8bit import AdamW8bit
from flatout.optim.flat import FlatAdamW, FlatOptimizer, FlatSGD, flatten

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


def make_optimizer(
    named: Mapping[str, nn.Parameter],
    config: OptimConfig,
    *,
    layer_norms: Collection[str] = (),
    seed: int = 0,
    flat: bool = False,
    offset_of: Callable[[Tensor], int] = lambda _: 0,
) -> torch.optim.Optimizer:
    """Create the configured optimizer over the trained parameters.

    AdamW is decoupled (Loshchilov and Hutter 2019, arXiv:1711.05101) and fused on CUDA. For bf16 weights and for
    adamw8bit it is AdamW8bit, whose random rounding depends on `seed`. `layer_norms` are the model's
    `layer_norm_parameters`, which do not decay, like biases and other norms. `flat` moves the parameters of adamw and
    sgd into one tensor per dtype and decay (`flatten`), so that an update is one launch; their gradients must always
    exist. `offset_of` is AdamW8bit's, for sharded parameters. Raises UsageError for bf16 weights with sgd.
    """
    is_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in named.values())
    if is_bf16 and config.name not in ("adamw", "adamw8bit"):
        raise UsageError(
            f"full.weights: bf16 would lose updates of optim.name={config.name}", [Fix({"optim.name": "adamw"})]
        )
    is_low_bit = is_bf16 or config.name == "adamw8bit"
    groups: list[dict[str, Any]] = []
    for names, decay in zip(split_by_decay(named, layer_norms), (config.weight_decay, 0.0), strict=True):
        # one launch cannot update plain tensors, such as slices of experts, together with DTensors
        for kind in (True, False):
            parameters = [named[name] for name in names if hasattr(named[name], "to_local") is kind]
            if parameters:
                groups.append(
                    {"params": flatten(parameters) if flat and not is_low_bit else parameters, "weight_decay": decay}
                )
    options: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.name == "adamw8bit" or is_bf16:
        return AdamW8bit(groups, eight_bit=config.name == "adamw8bit", seed=seed, offset_of=offset_of, **options)
    optimizer: torch.optim.Optimizer
    if config.name == "sgd":
        optimizer = (FlatSGD if flat else torch.optim.SGD)(groups, lr=config.lr, momentum=config.beta1)
    elif config.name == "adamw":
        on_gpu = all(parameter.is_cuda for parameter in named.values())
        optimizer = (FlatAdamW if flat else torch.optim.AdamW)(groups, fused=on_gpu, **options)
    else:
        assert_never(config.name)
    if isinstance(optimizer, FlatOptimizer):
        optimizer.gradient_views = [(p, p.grad) for p in named.values() if p.grad is not None]
    return optimizer
