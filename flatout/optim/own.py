"""An optimizer in a person's own file: a class `optim.path` names, made of parameter groups and settings."""

from __future__ import annotations

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
    optimizer.step = own.errors()(optimizer.step)  # type: ignore[method-assign]
    return optimizer


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
