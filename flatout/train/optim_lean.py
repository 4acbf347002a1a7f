"""AdamW for lean states: bf16 weights by stochastic rounding, moments in fp32 or in 8 bits; the arithmetic is fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.train.rounding import (
    BLOCK_SIZE,
    dequantize_blocks,
    dynamic_table,
    quantize_blocks,
    random_bits,
    round_to_bf16,
)

# elements updated by one launch, so that what is computed on the way stays small
SLICE_SIZE = 1 << 25
# smaller tensors (norms, biases) keep fp32 moments: they cost nothing and are the most sensitive
SMALLEST_8BIT = 4096
_NAMES = ("exp_avg", "exp_avg_sq")
_NAMES_8BIT = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")


class Factors(NamedTuple):
    """The numbers of one step as 0-d CPU tensors, so that a new learning rate is no new compiled graph."""

    keep: Tensor
    rate: Tensor
    root: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor

    @classmethod
    def of(cls, group: dict[str, Any], step: int, dtype: torch.dtype) -> Factors:
        beta1, beta2 = group["betas"]
        values = (
            1 - group["lr"] * group["weight_decay"],
            group["lr"] / (1 - beta1**step),
            1 / math.sqrt(1 - beta2**step),
            beta1,
            beta2,
            group["eps"],
        )
        return cls(*(torch.tensor(value, dtype=dtype) for value in values))


class LeanAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) with fp32 arithmetic for weights of any dtype (fp64 for fp64 ones).

    bf16 weights are rounded stochastically: the mean of many small updates is kept, where rounding to nearest would
    lose every update under 1/256 of a weight. The random bits depend on (`seed`, step, parameter, element) only.
    Moments are fp32; with `eight_bit` those of tensors of at least 4,096 values (a multiple of 256) are 8-bit codes
    with a scale every 256 values (Dettmers et al. 2021, arXiv:2110.02861). State: `step` int64 0-d on the CPU, and
    `exp_avg`, `exp_avg_sq` or, for each of them, `_codes` uint8 in the weight's shape and `_scales` fp32 (n / 256,).
    On CUDA the update is one compiled kernel for all shapes.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float, eight_bit: bool, seed: int
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.eight_bit, self.seed = eight_bit, seed
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        self._index = {parameter: index for index, parameter in enumerate(held)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            # the numbers of a step are the same for nearly all parameters, and each costs the host a tensor
            factors: dict[tuple[int, torch.dtype], Factors] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, factors)

    def state_names(self, parameter: Tensor) -> tuple[str, ...]:
        """The keys of a parameter's state."""
        size = parameter.numel()
        is_8bit = self.eight_bit and size >= SMALLEST_8BIT and size % BLOCK_SIZE == 0
        return ("step", *(_NAMES_8BIT if is_8bit else _NAMES))

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.zeros((), dtype=torch.int64)}
        for name in self.state_names(parameter)[1:]:
            if name.endswith("_scales"):
                state[name] = torch.zeros(parameter.numel() // BLOCK_SIZE, device=parameter.device)
            else:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                dtype = torch.uint8 if name.endswith("_codes") else wide
                state[name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        return state

    def _update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        group: dict[str, Any],
        known: dict[tuple[int, torch.dtype], Factors],
    ) -> None:
        state = self.state[parameter] = self.state[parameter] or self._new_state(parameter)
        state["step"] += 1
        step, index = int(state["step"]), self._index[parameter]
        wide = torch.promote_types(parameter.dtype, torch.float32)
        factors = known.get((step, wide)) or known.setdefault((step, wide), Factors.of(group, step, wide))
        names = self.state_names(parameter)[1:]
        is_8bit = names == _NAMES_8BIT
        tables = tuple(dynamic_table(signed, parameter.device) for signed in (True, False)) if is_8bit else ()
        update: Callable[..., None] = _update_8bit if is_8bit else _update_plain
        if parameter.is_cuda:
            update = _compiled(update)
        whole = [parameter.detach().view(-1), gradient.reshape(-1), *(state[name].view(-1) for name in names)]
        for number, begin in enumerate(range(0, parameter.numel(), SLICE_SIZE)):
            draw = np.random.SeedSequence([self.seed, step, index, number]).generate_state(1)
            parts = [_slice(tensor, begin, parameter.numel()) for tensor in whole]
            update(*parts, *tables, torch.tensor(int(draw[0])), factors)


@cache
def _compiled(update: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(update, fullgraph=True, dynamic=True)


def _slice(tensor: Tensor, begin: int, size: int) -> Tensor:
    """The part of a state (one entry each value or each block) that belongs to values [begin, begin + SLICE_SIZE)."""
    per_entry = size // tensor.numel()
    return tensor[begin // per_entry : (begin + SLICE_SIZE) // per_entry]


def _update_plain(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, key: Tensor, f: Factors) -> None:
    new_mean, new_square = _moments(gradient, mean, square, f)
    mean.copy_(new_mean)
    square.copy_(new_square)
    _apply(weight, new_mean, new_square, key, f)


def _update_8bit(
    weight: Tensor,
    gradient: Tensor,
    mean_codes: Tensor,
    mean_scales: Tensor,
    square_codes: Tensor,
    square_scales: Tensor,
    signed: Tensor,
    unsigned: Tensor,
    key: Tensor,
    f: Factors,
) -> None:
    mean = dequantize_blocks(mean_codes, mean_scales, signed)
    square = dequantize_blocks(square_codes, square_scales, unsigned)
    mean, square = _moments(gradient, mean, square, f)
    codes, scales = quantize_blocks(mean, signed)
    mean_codes.copy_(codes)
    mean_scales.copy_(scales)
    codes, scales = quantize_blocks(square, unsigned)
    # a mean square rounded to 0 would leave only eps to divide by: the smallest other value instead
    square_codes.copy_(codes.clamp(min=1))
    square_scales.copy_(scales)
    _apply(weight, mean, square, key, f)


def _moments(gradient: Tensor, mean: Tensor, square: Tensor, f: Factors) -> tuple[Tensor, Tensor]:
    gradient = gradient.to(mean.dtype)
    return f.beta1 * mean + (1 - f.beta1) * gradient, f.beta2 * square + (1 - f.beta2) * gradient * gradient


def _apply(weight: Tensor, mean: Tensor, square: Tensor, key: Tensor, f: Factors) -> None:
    value = weight.to(mean.dtype) * f.keep - f.rate * mean / (square.sqrt() * f.root + f.eps)
    weight.copy_(round_to_bf16(value, random_bits(value, key)) if weight.dtype == torch.bfloat16 else value)
