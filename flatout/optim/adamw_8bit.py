"""Memory-efficient AdamW: bf16 weights with stochastic rounding, moments in fp32 or 8 bits, arithmetic in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# values that share one scale of the 8-bit codes
BLOCK_SIZE = 256
_LOW_32 = 0xFFFFFFFF
# odd, below 2^31, so that its product with a 32-bit number fits int64
_MULTIPLIER = 0x45D9F3B
# elements updated per launch, which bounds the memory for intermediate results
SLICE_SIZE = 1 << 25
# smaller tensors (norms, biases) keep fp32 moments: they cost little memory and are the most sensitive
SMALLEST_8BIT = 4096
_NAMES = ("exp_avg", "exp_avg_sq")
_NAMES_8BIT = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")

# once per device, and once per form of the update
_one = cache(partial(torch.ones, (), dtype=torch.int64))
_compiled = cache(partial(torch.compile, fullgraph=True, dynamic=True))


class Factors(NamedTuple):
    """The scalars of one step as 0-d CPU tensors, so that a new learning rate does not cause a recompilation.

    `decay` is 1 - lr * weight_decay; `step_size` lr / (1 - beta1^t); `inv_sqrt_bias2` 1 / sqrt(1 - beta2^t).
    """

    decay: Tensor
    step_size: Tensor
    inv_sqrt_bias2: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor


@dataclass(slots=True)
class ParamPlan:
    """What all updates of one parameter share, cached because the host prepares several hundred updates per step.

    `parts` are flat slices of the weight and its moments. They are valid for the state with the tensor `step` and the
    weight at `address`. `num_updates` is the host's count of launched updates.
    """

    step: Tensor
    address: int
    num_updates: int
    wide: torch.dtype
    parts: list[tuple[Tensor, ...]]
    tables: tuple[Tensor, ...]
    update: Callable[..., None]


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) with fp32 arithmetic for weights of any dtype (fp64 for fp64 ones).

    bf16 weights are rounded stochastically, which preserves small updates on average; rounding to nearest would lose
    every update under 1/256 of a weight. The random bits depend only on (`seed`, step, parameter, element). Moments are
    fp32; with `eight_bit`, those of tensors with at least 4,096 values (and a multiple of 256) are 8-bit codes with a
    scale per 256 values (Dettmers et al. 2021, arXiv:2110.02861). State, on the weight's device: `step` int64 0-d, and
    `exp_avg`, `exp_avg_sq` or, for each of them, `_codes` uint8 in the weight's shape and `_scales` fp32 (n / 256,).
    All parameters must be on one device; on CUDA the update is one compiled kernel for all shapes.

    As in torch's fused optimizers, an update for which `found_inf` (0-d fp32 on the device, or None) is not 0 changes
    no weight or state, and the host does not wait for it. The host counts launched updates, for bias correction and
    random bits; call `recount` after updates were skipped.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float, eight_bit: bool, seed: int
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.eight_bit, self.seed = eight_bit, seed
        self.found_inf: Tensor | None = None
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        self._index = {parameter: index for index, parameter in enumerate(held)}
        self._plans: dict[Tensor, ParamPlan] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        is_applied = (
            _one(device=next(iter(self._index)).device) if self.found_inf is None else (self.found_inf == 0).long()
        )
        steps: list[Tensor] = []
        for group in self.param_groups:
            # shared, since the factors are the same for nearly all parameters and each needs a CPU tensor
            factors: dict[tuple[int, torch.dtype], Factors] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                plan = self._plan(parameter)
                plan.num_updates += 1
                step, dtype = plan.num_updates, plan.wide
                key = (step, dtype)
                if key not in factors:
                    beta1, beta2 = group["betas"]
                    decay, step_size = 1 - group["lr"] * group["weight_decay"], group["lr"] / (1 - beta1**step)
                    scalars = (decay, step_size, 1 / math.sqrt(1 - beta2**step), beta1, beta2, group["eps"])
                    factors[key] = Factors(*(torch.tensor(scalar, dtype=dtype) for scalar in scalars))
                gradients = parameter.grad.reshape(-1).split(SLICE_SIZE)
                for number, (part, (weight, *moments)) in enumerate(zip(gradients, plan.parts, strict=True)):
                    entropy = [self.seed, step, self._index[parameter], number]
                    noise_seed = torch.tensor(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
                    plan.update(weight, part.detach(), *moments, *plan.tables, noise_seed, is_applied, factors[key])
                steps.append(plan.step)
        if steps:
            # a list of one tensor, since a single tensor argument would be read by the host
            torch._foreach_add_(steps, [is_applied] * len(steps))

    def recount(self) -> None:
        """Read the number of updates from the state again; the next step waits for the device."""
        self._plans.clear()

    def state_names(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the keys of a parameter's state."""
        size = parameter.numel()
        is_8bit = self.eight_bit and size >= SMALLEST_8BIT and size % BLOCK_SIZE == 0
        return ("step", *(_NAMES_8BIT if is_8bit else _NAMES))

    def _plan(self, parameter: Tensor) -> ParamPlan:
        state, plan = self.state[parameter], self._plans.get(parameter)
        if plan is not None and plan.step is state.get("step") and plan.address == parameter.data_ptr():
            return plan
        names = self.state_names(parameter)[1:]
        wide, size, device = torch.promote_types(parameter.dtype, torch.float32), parameter.numel(), parameter.device
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64, device=device)
            for name in names:
                if name.endswith("_scales"):
                    state[name] = torch.zeros(size // BLOCK_SIZE, dtype=torch.float32, device=device)
                else:
                    dtype = torch.uint8 if name.endswith("_codes") else wide
                    state[name] = torch.zeros(parameter.shape, dtype=dtype, device=device)
        is_8bit = names == _NAMES_8BIT
        update: Callable[..., None] = _update_8bit if is_8bit else _update_plain
        whole = [parameter.detach().view(-1), *(state[name].view(-1) for name in names)]
        # parts for SLICE_SIZE values each, though scales have one entry per block; detached, so that compiled calls
        # neither check the view's base nor recompile for its shape
        slices = [[part.detach() for part in each.split(SLICE_SIZE * each.numel() // size)] for each in whole]
        self._plans[parameter] = plan = ParamPlan(
            step=state["step"],
            address=parameter.data_ptr(),
            num_updates=int(state["step"]),
            wide=wide,
            parts=list(zip(*slices, strict=True)),
            tables=tuple(dynamic_table(signed, device) for signed in (True, False)) if is_8bit else (),
            update=_compiled(update) if parameter.is_cuda else update,
        )
        return plan


def _update_plain(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, noise_seed: Tensor, is_applied: Tensor, f: Factors
) -> None:
    new_mean, new_square = _update_weight(weight, gradient, mean, square, noise_seed, is_applied, f)
    _put(mean, new_mean, is_applied)
    _put(square, new_square, is_applied)


def _update_8bit(
    weight: Tensor,
    gradient: Tensor,
    mean_codes: Tensor,
    mean_scales: Tensor,
    square_codes: Tensor,
    square_scales: Tensor,
    signed: Tensor,
    unsigned: Tensor,
    noise_seed: Tensor,
    is_applied: Tensor,
    f: Factors,
) -> None:
    mean = dequantize_blocks(mean_codes, mean_scales, signed)
    square = dequantize_blocks(square_codes, square_scales, unsigned)
    mean, square = _update_weight(weight, gradient, mean, square, noise_seed, is_applied, f)
    codes, scales = quantize_blocks(mean, signed)
    _put(mean_codes, codes, is_applied)
    _put(mean_scales, scales, is_applied)
    codes, scales = quantize_blocks(square, unsigned)
    # a mean square rounded to 0 would leave only eps as the divisor, so use at least the smallest nonzero value
    _put(square_codes, codes.clamp(min=1), is_applied)
    _put(square_scales, scales, is_applied)


def _update_weight(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, noise_seed: Tensor, is_applied: Tensor, f: Factors
) -> tuple[Tensor, Tensor]:
    """Update the weight by the moments with this gradient, and return these moments."""
    gradient = gradient.to(mean.dtype)
    mean = f.beta1 * mean + (1 - f.beta1) * gradient
    square = f.beta2 * square + (1 - f.beta2) * gradient * gradient
    value = weight.to(mean.dtype) * f.decay - f.step_size * mean / (square.sqrt() * f.inv_sqrt_bias2 + f.eps)
    rounded = round_to_bf16(value, random_bits(value, noise_seed)) if weight.dtype == torch.bfloat16 else value
    _put(weight, rounded, is_applied)
    return mean, square


def _put(held: Tensor, new: Tensor, is_applied: Tensor) -> None:
    """Write `new` to `held` if the update is applied."""
    # not a product with 0 or 1: a skipped value may be infinite
    held.copy_(torch.where(is_applied > 0, new, held))


def random_bits(like: Tensor, noise_seed: Tensor) -> Tensor:
    """Return 16 random bits per element as int64 (n,), the shape of `like`, from `noise_seed` and the element's index.

    `noise_seed` is a 0-d int64 tensor in [0, 2^32). The bits are a counter hashed by two rounds of shift, xor and
    multiply, so there is no state to save and they are the same on every device.
    """
    number = (torch.arange(like.numel(), device=like.device) + noise_seed) & _LOW_32
    number = ((number ^ (number >> 16)) * _MULTIPLIER) & _LOW_32
    number = ((number ^ (number >> 16)) * _MULTIPLIER) & _LOW_32
    return (number ^ (number >> 16)) & 0xFFFF


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 values stochastically to one of their two bf16 neighbors, so that the mean over `bits` is the value.

    `bits` are uniform in [0, 2^16), of the same shape. A value is rounded away from zero when its lower 16 bits plus
    the random bits carry over. Infinities and NaN are kept.
    """
    added = (values.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    # a NaN's bits could carry over into the sign, which would turn the NaN into a zero
    return torch.where(values.isfinite(), added.view(torch.float32), values).to(torch.bfloat16)


@cache
def dynamic_table(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 fp32 values of the dynamic 8-bit code, ascending up to 1.

    The code is that of Dettmers et al. 2021, arXiv:2110.02861. The values are 0, 1 and seven decades below 1, each with
    twice as many evenly spaced values as the one below it. Unsigned codes have twice as many values per decade as
    signed ones have on each side of zero.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        centres = [(0.1 + 0.9 * (index + 0.5) / count) * 10.0 ** (decade - 6) for index in range(count)]
        values += centres + [-centre for centre in centres] * signed
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def quantize_blocks(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize fp32 `values` (n,) to uint8 codes (n,) for the nearest entries of `table`, and fp32 scales (n / 256,).

    A block's scale is its largest magnitude; n must be a multiple of 256.
    """
    blocks = values.view(-1, BLOCK_SIZE)
    scales = blocks.abs().amax(1)
    boundaries = (table[1:] + table[:-1]) / 2
    # clamp, so that a block of zeros is not divided by zero
    codes = torch.bucketize(blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None], boundaries)
    return codes.view(-1).to(torch.uint8), scales


def dequantize_blocks(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Return the fp32 values (n,) that the codes and scales of `quantize_blocks` stand for."""
    return (table[codes.to(torch.int32)].view(-1, BLOCK_SIZE) * scales[:, None]).view(-1)
