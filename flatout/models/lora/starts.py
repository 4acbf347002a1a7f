"""What an adapter's A begins with. B begins with zeros, so a new adapter leaves the model as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TypeAlias

import torch
from torch import Tensor

from flatout.config.model import ADAPTER_STARTS, LoraConfig
from flatout.config.own_code import OwnCode
from flatout.errors import UsageError


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """Where an adapter's A is made."""

    num_rows: int
    """The rank, times the number of experts for a matrix of fused experts."""
    num_in: int
    weight: Callable[[], Tensor]
    """Returns the frozen weight in fp32 on the CPU: (out, in), or (experts, out, in) of fused experts."""
    rank: int


AdapterStart: TypeAlias = Callable[[AdapterPlace, torch.Generator], Tensor]
"""Returns A (num_rows, num_in) on the CPU. Its values depend on its arguments alone, as ranks and verify call it."""


def uniform(place: AdapterPlace, generator: torch.Generator) -> Tensor:
    """Return values of uniform(-1/sqrt(in), 1/sqrt(in)), like PEFT."""
    bound = 1 / math.sqrt(place.num_in)
    return torch.empty(place.num_rows, place.num_in).uniform_(-bound, bound, generator=generator)


def gaussian(place: AdapterPlace, generator: torch.Generator) -> Tensor:
    """Return normal values with mean 0 and standard deviation 1/rank, like PEFT's init_lora_weights="gaussian"."""
    return torch.empty(place.num_rows, place.num_in).normal_(std=1 / place.rank, generator=generator)


def adapter_start(config: LoraConfig) -> AdapterStart:
    """Return the start that these settings name. Raises UsageError for a person's own one that cannot be used."""
    if config.init_path is None:
        module, _, function = ADAPTER_STARTS[config.init].partition(".")
        return getattr(import_module(f"flatout.models.lora.{module}"), function)
    own = OwnCode.read(config.init_path, "lora.init_path", "adapter start")
    function = own.load()
    if not callable(function):
        raise UsageError(f"lora.init_path: {config.init_path}: no such function; define {own.name}(place, generator)")

    def checked(place: AdapterPlace, generator: torch.Generator) -> Tensor:
        with own.errors():
            first = function(place, generator)
        wanted = (place.num_rows, place.num_in)
        if not isinstance(first, Tensor) or tuple(first.shape) != wanted or not first.isfinite().all():
            got = f"a tensor of shape {tuple(first.shape)}" if isinstance(first, Tensor) else type(first).__name__
            raise UsageError(f"lora.init_path: {config.init_path} returned {got}; expected finite numbers {wanted}")
        return first

    return checked


def first_values(
    start: AdapterStart, place: AdapterPlace, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return A on a device; on the meta device without values."""
    if device.type == "meta":
        return torch.empty(place.num_rows, place.num_in, dtype=dtype, device=device)
    # a start of one's own may return a part of a weight: A never shares its memory
    return start(place, generator).to(device, dtype, copy=True)


def cpu_copy(weight: Tensor) -> Tensor:
    """Return a weight's values in fp32 on the CPU, which a start may change."""
    return weight.detach().to("cpu", torch.float32, copy=True)
