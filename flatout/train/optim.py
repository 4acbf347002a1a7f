"""Optimizers, their parameter groups, and their state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatout.config.schema import OptimConfig
from flatout.errors import CheckpointError, UsageError
from flatout.parallel.shards import is_sharded, part_of
from flatout.parallel.strategy import KeepsState
from flatout.train.flat import FlatAdamW, FlatSGD, flatten, owners
from flatout.train.optim_lean import LeanAdamW
from flatout.train.rounding import BLOCK_SIZE
from flatout.train.stored import StoredTensors


def split_by_decay(named: Mapping[str, nn.Parameter]) -> tuple[list[str], list[str]]:
    """Names with and without weight decay: vectors (biases, norms) have none."""
    decayed = [name for name, parameter in named.items() if parameter.ndim >= 2]
    return decayed, [name for name in named if name not in set(decayed)]


def make_optimizer(
    named: Mapping[str, nn.Parameter], config: OptimConfig, *, seed: int = 0, flat: bool = False
) -> torch.optim.Optimizer:
    """The configured optimizer over the trained parameters.

    AdamW is decoupled (Loshchilov and Hutter 2019, arXiv:1711.05101) and fused on CUDA; for bf16 weights and for
    adamw8bit it is LeanAdamW, whose rounding `seed` decides. `flat` moves the parameters of adamw and sgd into one
    tensor for each dtype and decay (`flatten`): one launch an update, for gradients that always exist. Raises
    UsageError for bf16 weights with sgd.
    """
    is_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in named.values())
    if is_bf16 and config.name == "sgd":
        raise UsageError("full.weights: bf16 needs optim.name adamw or adamw8bit; got sgd, which would lose updates")
    is_lean = is_bf16 or config.name == "adamw8bit"
    groups: list[dict[str, Any]] = []
    for names, decay in zip(split_by_decay(named), (config.weight_decay, 0.0), strict=True):
        held = [named[name] for name in names]
        if held:
            groups.append({"params": flatten(held) if flat and not is_lean else held, "weight_decay": decay})
    if config.name == "sgd":
        if flat:
            return FlatSGD(groups, lr=config.lr, momentum=config.beta1).over(named.values())
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.beta1)
    options: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if is_lean:
        return LeanAdamW(groups, eight_bit=config.name == "adamw8bit", seed=seed, **options)
    on_gpu = all(parameter.is_cuda for parameter in named.values())
    if flat:
        return FlatAdamW(groups, fused=on_gpu, **options).over(named.values())
    return torch.optim.AdamW(groups, fused=on_gpu, **options)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next update, for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_sizes(named: Mapping[str, nn.Parameter], config: OptimConfig) -> list[int]:
    """About the bytes of each tensor of this rank's parts of the parameters and, once it is there, of their optimizer
    state."""
    sizes = []
    for parameter in named.values():
        local = part_of(parameter).local
        widest = max(local.element_size(), 4)
        moments: dict[str, list[float]] = {
            "adamw": [widest, widest],
            "adamw8bit": [1, 1, 4 / BLOCK_SIZE, 4 / BLOCK_SIZE],
            "sgd": [local.element_size()],
        }
        sizes += [int(local.numel() * width) for width in [local.element_size(), *moments[config.name]]]
    return sizes


def optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], *, keep: bool = True
) -> dict[str, Tensor]:
    """The state as tensors named `<parameter>/<key>`, such as `q_proj.lora_a/exp_avg`, whether parameters are flat
    or not; the tensors are the live ones. Collective where the optimizer keeps the state itself: then they are copies
    in host memory, on ranks with `keep` only."""
    tensors: dict[str, Tensor] = {}
    if isinstance(optimizer, KeepsState):
        for name, parameter in named.items():
            state = optimizer.state_of(parameter)
            tensors |= {f"{name}/{key}": value.cpu() for key, value in state.items() if keep}
        return tensors
    for name, (owner, offset) in owners(named, optimizer).items():
        parameter = named[name]
        for key, value in optimizer.state.get(owner, {}).items():
            if value is None:
                continue
            is_part = owner is not parameter and key != "step"
            part = value[offset : offset + parameter.numel()].view(parameter.shape) if is_part else value
            tensors[f"{name}/{key}"] = part
    return tensors


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `optimizer_state` gave. Raises CheckpointError when it belongs to other parameters."""
    states = _keys_by_parameter(named, tensors)
    if isinstance(optimizer, KeepsState):
        for name, state in states.items():
            for key in state:
                optimizer.set_state(named[name], key, tensors[f"{name}/{key}"])
        return
    places = owners(named, optimizer)
    for name, state in states.items():
        (owner, offset), parameter = places[name], named[name]
        if isinstance(optimizer, LeanAdamW) and set(state) != set(optimizer.state_names(parameter)):
            raise CheckpointError(f"the saved optimizer keeps {', '.join(sorted(state))} for {name}; this one does not")
        for key in state:
            # read only now: all parameters' states together may be larger than this host's memory
            full_name = f"{name}/{key}"
            if key == "step":
                # torch's fused AdamW and ours count on the GPU, all others on the host
                on_device = optimizer.defaults.get("fused") or isinstance(optimizer, LeanAdamW)
                device = parameter.device if on_device else "cpu"
                optimizer.state[owner][key] = tensors[full_name].to(device, copy=True)
            elif isinstance(tensors, StoredTensors) and is_sharded(parameter):
                optimizer.state[owner][key] = tensors.like(full_name, parameter)
            elif owner is parameter:
                optimizer.state[owner][key] = tensors[full_name].to(parameter.device, copy=True)
            else:
                whole = optimizer.state[owner].setdefault(key, torch.zeros_like(owner))
                whole[offset : offset + parameter.numel()].view(parameter.shape).copy_(tensors[full_name])


def _keys_by_parameter(named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    states: dict[str, list[str]] = {}
    for full_name in tensors:
        name, _, key = full_name.rpartition("/")
        if name not in named:
            raise CheckpointError(f"the saved optimizer has state for {name}, which this run does not train")
        states.setdefault(name, []).append(key)
    if states and (missing := sorted(set(named) - set(states))):
        raise CheckpointError(f"the saved optimizer has no state for {missing[0]} ({len(missing)} parameters)")
    return states
