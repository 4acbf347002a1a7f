"""Optimizers, their parameter groups, and their state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatout.config.schema import OptimConfig
from flatout.errors import CheckpointError, UsageError


def split_by_decay(named: Mapping[str, nn.Parameter]) -> tuple[list[str], list[str]]:
    """Names with and without weight decay: vectors (biases, norms) have none."""
    decayed = [name for name, parameter in named.items() if parameter.ndim >= 2]
    return decayed, [name for name in named if name not in set(decayed)]


def make_optimizer(named: Mapping[str, nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """The configured optimizer over the trained parameters.

    AdamW is decoupled (Loshchilov and Hutter 2019, arXiv:1711.05101) and fused on CUDA. Raises UsageError when
    adamw8bit is asked for without bitsandbytes or without a GPU.
    """
    groups: list[dict[str, Any]] = [
        {"params": [named[name] for name in names], "weight_decay": decay}
        for names, decay in zip(split_by_decay(named), (config.weight_decay, 0.0), strict=True)
        if names
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.beta1)
    on_gpu = all(parameter.is_cuda for parameter in named.values())
    betas = (config.beta1, config.beta2)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=on_gpu)
    try:
        import bitsandbytes
    except ImportError as error:
        raise UsageError("optim.name=adamw8bit needs bitsandbytes; install flatout[gpu] or use adamw") from error
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=config.lr, betas=betas, eps=config.eps)
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next update, for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_state(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The state as tensors named `<parameter>/<key>`, such as `q_proj.lora_a/exp_avg`; plain numbers are 0-d fp64."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
    return {
        f"{names[parameter]}/{key}": value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if value is not None
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `optimizer_state` gave. Raises CheckpointError when it belongs to other parameters."""
    states: dict[str, dict[str, Any]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("/")
        if name not in named:
            raise CheckpointError(f"the saved optimizer has state for {name}, which this run does not train")
        # a number that was no tensor before (bitsandbytes keeps its step so) becomes one again
        is_number = tensor.ndim == 0 and tensor.dtype == torch.float64 and named[name].dtype != torch.float64
        states.setdefault(name, {})[key] = int(tensor) if is_number else tensor
    if states and (missing := sorted(set(named) - set(states))):
        raise CheckpointError(f"the saved optimizer has no state for {missing[0]} ({len(missing)} parameters)")
    order = {parameter: name for name, parameter in named.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole = optimizer.state_dict()
    whole["state"] = {i: states[order[p]] for i, p in enumerate(parameters) if order[p] in states}
    optimizer.load_state_dict(whole)
