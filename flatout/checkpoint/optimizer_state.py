"""Save and load optimizer state as named tensors, for every optimizer and strategy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flatout.checkpoint.read import CheckpointTensors
from flatout.config.schema import OptimConfig
from flatout.errors import CheckpointError
from flatout.optim.adamw_8bit import AdamW8bit, block_size
from flatout.optim.flat import owners
from flatout.parallel.shards import as_global, is_sharded, local_shard_of
from flatout.parallel.strategies.deepspeed import PartitionedOptimizer


def state_sizes(named: Mapping[str, nn.Parameter], config: OptimConfig) -> list[int]:
    """Estimate the size in bytes of each tensor that this rank holds: parameters (local shards) and optimizer state."""
    sizes = []
    for parameter in named.values():
        local = local_shard_of(parameter).local
        widest = max(local.element_size(), 4)
        block = block_size(parameter.shape)
        moments: dict[str, list[float]] = {
            "adamw": [widest, widest],
            "adamw8bit": [1, 1, 4 / block, 4 / block] if block else [widest, widest],
            "sgd": [local.element_size()],
        }
        sizes += [int(local.numel() * width) for width in [local.element_size(), *moments[config.name]]]
    return sizes


def optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], *, keep: bool = True
) -> dict[str, Tensor]:
    """Return the state as live tensors named `<parameter>/<key>`, such as `q_proj.lora_a/exp_avg`, flat or not.

    For a PartitionedOptimizer the call is collective and returns copies in host memory, only on ranks with `keep`.
    """
    tensors: dict[str, Tensor] = {}
    if isinstance(optimizer, PartitionedOptimizer):
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
            tensors[f"{name}/{key}"] = part if key == "step" else as_global(part, parameter)
    return tensors


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Load what `optimizer_state` returned. Raises CheckpointError when it belongs to other parameters."""
    states = _keys_by_parameter(named, tensors)
    if isinstance(optimizer, PartitionedOptimizer):
        for name, state in states.items():
            for key in state:
                optimizer.set_state(named[name], key, tensors[f"{name}/{key}"])
        return
    places = owners(named, optimizer)
    for name, state in states.items():
        (owner, offset), parameter = places[name], named[name]
        if isinstance(optimizer, AdamW8bit) and set(state) != set(optimizer.state_names(parameter)):
            raise CheckpointError(f"the saved optimizer has {', '.join(sorted(state))} for {name}; this one does not")
        # scales have a shape of their own
        shapes = optimizer.new_state(parameter) if isinstance(optimizer, AdamW8bit) else {}
        for key in state:
            # read one at a time: the states of all parameters together may exceed the host's memory
            full_name = f"{name}/{key}"
            if key == "step":
                # torch's fused AdamW and ours keep the step on the GPU, all others on the host
                on_device = optimizer.defaults.get("fused") or isinstance(optimizer, AdamW8bit)
                device = parameter.device if on_device else "cpu"
                optimizer.state[owner][key] = tensors[full_name].to(device, copy=True)
            elif isinstance(tensors, CheckpointTensors) and (is_sharded(parameter) or key in shapes):
                optimizer.state[owner][key] = tensors.like(full_name, shapes.get(key, parameter))
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
