"""Save and load optimizer state as named tensors, for every optimizer and strategy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from flatout.checkpoint.read import CheckpointTensors
from flatout.config.optim import OptimConfig, OptimizerTraits
from flatout.errors import CheckpointError
from flatout.optim.adamw_8bit import block_size
from flatout.optim.flat import owners
from flatout.optim.options import ShapedOptimizer
from flatout.optim.own import require_state
from flatout.parallel.shards import as_global, is_sharded, local_shard_of
from flatout.parallel.strategies.protocol import EngineState, Strategy


def state_sizes(named: Mapping[str, nn.Parameter], config: OptimConfig, matrices: Collection[str] = ()) -> list[int]:
    """Estimate the size in bytes of each tensor that this rank holds: parameters (local shards) and optimizer state.

    `matrices` are the names of `hidden_matrices`.
    """
    sizes, traits = list[int](), config.traits
    for name, parameter in named.items():
        local = local_shard_of(parameter).local
        widths: list[float] = [max(local.element_size(), 4)]
        if traits.stores_8_bits and (block := block_size(parameter.shape)):
            widths = [1, 4 / block]
        shapes = traits.state_shapes(local.shape, is_matrix=name in matrices).values()
        sizes += [local.nbytes, *(int(math.prod(shape) * width) for shape in shapes for width in widths)]
    return sizes


def optimizer_state(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, nn.Parameter],
    *,
    engine: EngineState | None = None,
    keep: bool = True,
) -> dict[str, Tensor]:
    """Return the state as live tensors named `<parameter>/<key>`, such as `q_proj.lora_a/exp_avg`, flat or not.

    From an engine the call is collective and returns copies in host memory, only on ranks with `keep`. Raises
    UsageError for an optimizer in a person's own file whose state is not what its traits say: it could not be loaded.
    """
    tensors: dict[str, Tensor] = {}
    if engine is not None:
        for name, parameter in named.items():
            state = engine.state_of(parameter)
            tensors |= {f"{name}/{key}": value.cpu() for key, value in state.items() if keep}
        return tensors
    for name, (owner, offset) in owners(named, optimizer).items():
        parameter = named[name]
        state = {key: value for key, value in optimizer.state.get(owner, {}).items() if value is not None}
        require_state(optimizer, state)
        for key, value in state.items():
            is_part = owner is not parameter and key != "step"
            part = value[offset : offset + parameter.numel()].view(parameter.shape) if is_part else value
            tensors[f"{name}/{key}"] = part if key == "step" else as_global(part, parameter)
    return tensors


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    traits: OptimizerTraits,
    strategy: Strategy | None = None,
) -> None:
    """Load what `optimizer_state` returned; `traits` are the optimizer's.

    Raises CheckpointError when it belongs to other parameters, or to another optimizer.
    """
    states = _keys_by_parameter(named, tensors)
    if strategy and strategy.engine_state:
        for name, state in states.items():
            for key in state:
                shape = () if key == "step" else strategy.whole_shape(named[name])
                _require_fit(tensors, f"{name}/{key}", shape, None)
                strategy.engine_state.set_state(named[name], key, tensors[f"{name}/{key}"])
        return
    places = owners(named, optimizer)
    for name, state in states.items():
        (owner, offset), parameter = places[name], named[name]
        like = optimizer.new_state(parameter) if isinstance(optimizer, ShapedOptimizer) else {}
        expected = set(like) or traits.state_keys
        if set(state) != expected:
            kinds = ", ".join(sorted(state))
            raise CheckpointError(
                f"the saved optimizer has {kinds} for {name}, but this one needs {', '.join(sorted(expected))}; use "
                "the checkpoint's settings, or restore it from a backup"
            )
        for key in state:
            # read one at a time: the states of all parameters together may exceed the host's memory
            full_name, template = f"{name}/{key}", like.get(key, parameter)
            if key == "step":
                _require_fit(tensors, full_name, (), None)
                # torch's fused and capturable optimizers keep the step on the GPU, others on the host
                on_device = any(map(optimizer.defaults.get, ("fused", "capturable")))
                device = like["step"].device if like else torch.device(parameter.device if on_device else "cpu")
                optimizer.state[owner][key] = tensors[full_name].to(device, copy=True)
                continue
            # a person's own class may keep moments in another dtype than its weights
            dtype = template.dtype if traits.make else None
            _require_fit(tensors, full_name, local_shard_of(template).shape, dtype)
            if isinstance(tensors, CheckpointTensors) and (is_sharded(parameter) or key in like):
                optimizer.state[owner][key] = tensors.like(full_name, template)
            elif owner is parameter:
                optimizer.state[owner][key] = tensors[full_name].to(parameter.device, copy=True)
            else:
                whole = optimizer.state[owner].setdefault(key, torch.zeros_like(owner))
                whole[offset : offset + parameter.numel()].view(parameter.shape).copy_(tensors[full_name])


def _require_fit(tensors: Mapping[str, Tensor], name: str, shape: Sequence[int], dtype: torch.dtype | None) -> None:
    """Raise CheckpointError for a state of another shape, or of another dtype than `dtype` (None: any number)."""
    if isinstance(tensors, CheckpointTensors):
        saved_shape, kind = tensors.shapes[name], tensors.dtype(name)
    else:
        saved_shape, kind = tuple(tensors[name].shape), tensors[name].dtype
    if saved_shape != tuple(shape) or kind == torch.bool or dtype not in (None, kind):
        wanted = f"{tuple(shape)}" + (f" of {dtype}" if dtype else "")
        raise CheckpointError(
            f"the saved optimizer's {name} has shape {saved_shape} of {kind}, but this run's {wanted}; use the "
            "checkpoint's settings, or restore it from a backup"
        )


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
