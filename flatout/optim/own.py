"""An optimizer in a person's own file: a class `optim.path` names, made of parameter groups and settings."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from flatout.config.optim import OptimConfig, OptimizerTraits
from flatout.config.own_code import OwnCode
from flatout.config.section import refuse_unused
from flatout.errors import SettingError, UsageError
from flatout.optim.options import ParamGroups


def make_own(groups: ParamGroups, config: OptimConfig) -> torch.optim.Optimizer:
    """Make the optimizer of `optim.path`, whose own errors are UsageErrors. Raises as `load_class`."""
    own, make = _code(config), load_class(config)
    with own.errors():
        optimizer: torch.optim.Optimizer = make(groups, config)
    # not the optimizer itself, which a cycle would keep until the collector runs, with its moments on the GPU
    of_optimizer, is_checked = weakref.ref(optimizer), False

    def step(*args: Any) -> Any:
        nonlocal is_checked
        alive = of_optimizer()
        assert alive is not None
        with own.errors():
            result = make.step(alive, *args)
        if not is_checked:  # after the first update, not at the first save
            for state in alive.state.values():
                require_state(alive, state)
            is_checked = True
        return result

    optimizer.step = step  # type: ignore[assignment, method-assign]
    return optimizer


def require_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raise UsageError if a parameter's state is not what the traits of a person's own class say."""
    traits: OptimizerTraits | None = getattr(optimizer, "traits", None)
    keys = {key for key, value in state.items() if value is not None}
    if traits and keys and keys != traits.state_keys:
        raise UsageError(
            f"optim.path: the state of {type(optimizer).__name__} has {', '.join(sorted(keys))}, but its `traits` say "
            f"{', '.join(sorted(traits.state_keys))}; correct them"
        )


def _code(config: OptimConfig) -> OwnCode:
    assert config.path is not None
    return OwnCode.read(config.path, "optim.path", "optimizer")


def load_class(config: OptimConfig) -> Any:
    """Return the class that `optim.path` names. Raises UsageError for one that cannot be used."""
    own = _code(config)
    kind = own.load()
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        what = "has no such class" if kind is None else "it is not a subclass of torch.optim.Optimizer"
        raise UsageError(
            f"optim.path: {config.path}: {what}; define class {own.name}(torch.optim.Optimizer) in {own.path}"
        )
    traits = getattr(kind, "traits", None)
    if not isinstance(traits, OptimizerTraits):
        raise UsageError(
            f"{config.path}: `traits` is {traits!r:.100}; set it to flatout.OptimizerTraits(moments=(...)), with the "
            "keys of the state's tensors"
        )
    try:
        refuse_unused(config, traits.unused, f"optim.path: {config.path}, which does not read it")
    except SettingError as error:
        raise UsageError(f"optim: {error}") from error
    return kind
