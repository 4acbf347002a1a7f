"""Memory-efficient AdamW: bf16 weights with stochastic rounding, moments in fp32 or 8 bits, arithmetic in fp32."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.config.optim import OptimConfig
from flatout.kernels.rounding import LOW_32, hash_32
from flatout.optim.options import OptimizerOptions, ParamGroups, ShapedOptimizer

# values that share one scale of the 8-bit codes, at most and at least
BLOCK_SIZE = 256
SMALLEST_BLOCK = 64
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

    `parts` are flat slices of the weight (this rank's shard) and its moments, of `sizes` values, and `places` their
    number and first element in the global tensor's slices. They are valid for the state with the tensor `step` and the
    weight at `address`. `num_updates` is the host's count of launched updates.
    """

    step: Tensor
    address: int
    num_updates: int
    wide: torch.dtype
    sizes: list[int]
    places: list[tuple[int, int]]
    parts: list[tuple[Tensor, ...]]
    tables: tuple[Tensor, ...]
    block: tuple[int, ...]
    update: Callable[..., None]


class AdamW8bit(ShapedOptimizer):
    """AdamW (arXiv:1711.05101) with fp32 arithmetic for weights of any dtype (fp64 for fp64 ones).

    bf16 weights are rounded stochastically, as rounding to nearest would lose every update under 1/256 of a weight. The
    random bits depend only on (`seed`, step, parameter, element). Moments are fp32; with `eight_bit`, those of tensors
    that have a `block_size` are 8-bit codes with a scale per block (Dettmers et al. 2021, arXiv:2110.02861). State:
    `step` int64 0-d, and `exp_avg`, `exp_avg_sq` or, for each of them, `_codes` uint8 in the weight's shape and
    `_scales` fp32 (..., blocks in a row). All parameters must be on one device, on CUDA with one compiled kernel.

    Parameters may be DTensors sharded along their first dimension: the state is sharded alike, and an update has the
    same bits on any number of ranks. `offset_of` returns a shard's first element in the flat global tensor.

    As in torch's fused optimizers, an update for which `found_inf` (0-d fp32 on the device, or None) is not 0 changes
    nothing, and the host does not wait for it. The host counts launched updates: call `recount` after skipped ones.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float, eight_bit: bool, seed: int,
        offset_of: Callable[[Tensor], int] = lambda _: 0,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.eight_bit, self.seed, self._offset_of = eight_bit, seed, offset_of
        self.found_inf: Tensor | None = None
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._index = {parameter: index for index, parameter in enumerate(parameters)}
        self._plans: dict[Tensor, ParamPlan] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        device = next(iter(self._index)).device
        is_applied = _one(device=device) if self.found_inf is None else (self.found_inf == 0).long().to(device)
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
                gradients = _local(parameter.grad).reshape(-1).split(plan.sizes)
                for (number, first), part, (weight, *moments) in zip(plan.places, gradients, plan.parts, strict=True):
                    entropy = [self.seed, step, self._index[parameter], number]
                    noise_seed = torch.tensor(int(np.random.SeedSequence(entropy).generate_state(1)[0]) + first)
                    plan.update(
                        weight, part.detach(), *moments, *plan.tables, noise_seed, is_applied, factors[key], *plan.block
                    )
                steps.append(plan.step)
        if steps:
            # a list of one tensor, since a single tensor argument would be read by the host
            torch._foreach_add_(steps, [is_applied] * len(steps))

    def recount(self) -> None:
        """Read the number of updates from the state again; the next step waits for the device."""
        self._plans.clear()

    def state_names(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the keys of a parameter's state."""
        is_8bit = self.eight_bit and block_size(parameter.shape) is not None
        return ("step", *(_NAMES_8BIT if is_8bit else _NAMES))

    @torch.no_grad()
    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state before the first update, sharded as the parameter is."""
        detached, wide = parameter.detach(), torch.promote_types(parameter.dtype, torch.float32)
        state = {"step": torch.zeros((), dtype=torch.int64, device=detached.device)}
        for name in self.state_names(parameter)[1:]:
            like, dtype = detached, torch.uint8 if name.endswith("_codes") else wide
            if name.endswith("_scales"):
                like, dtype = detached[..., : detached.shape[-1] // (block_size(detached.shape) or 1)], torch.float32
            state[name] = torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)
        return state

    def _plan(self, parameter: Tensor) -> ParamPlan:
        state, plan = self.state[parameter], self._plans.get(parameter)
        weight = _local(parameter.detach())
        if plan is not None and plan.step is state.get("step") and plan.address == weight.data_ptr():
            return plan
        if not state:
            state.update(self.new_state(parameter))
        names = self.state_names(parameter)[1:]
        block = block_size(parameter.shape) if names == _NAMES_8BIT else None
        update: Callable[..., None] = _update_8bit if block else _update_plain
        # slices by the place in the global tensor, and of whole blocks
        length, first = SLICE_SIZE // (block or 1) * (block or 1), self._offset_of(parameter)
        end = first + weight.numel()
        cuts = [first, *range((first // length + 1) * length, end, length), end]
        sizes = [stop - start for start, stop in itertools.pairwise(cuts) if stop > start]
        flat_tensors = [weight.view(-1), *(_local(state[name]).view(-1) for name in names)]
        # scales have one entry per block; detached, so that compiled calls neither check the view's base nor recompile
        # for its shape
        widths = [1, *((block or 1) if name.endswith("_scales") else 1 for name in names)]
        slices = [
            [part.detach() for part in tensor.split([size // width for size in sizes])]
            for tensor, width in zip(flat_tensors, widths, strict=True)
        ]
        self._plans[parameter] = plan = ParamPlan(
            step=state["step"],
            address=weight.data_ptr(),
            num_updates=int(state["step"]),
            wide=torch.promote_types(parameter.dtype, torch.float32),
            sizes=sizes,
            places=[divmod(start, length) for start, _ in zip(cuts, sizes, strict=False)],
            parts=list(zip(*slices, strict=True)),
            tables=tuple(dynamic_table(signed, weight.device) for signed in (True, False)) if block else (),
            # left out at 256, so that the kernel for nearly all tensors has it as a constant
            block=(block,) if block not in (None, BLOCK_SIZE) else (),
            update=_compiled(update) if weight.is_cuda else update,
        )
        return plan


def _local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, without torchao's wrapper, and a plain tensor as it is."""
    return torch.ops.aten.alias(tensor.to_local()) if hasattr(tensor, "to_local") else tensor


def block_size(shape: Sequence[int]) -> int | None:
    """Return how many values share a scale in a tensor of this shape, or None if its moments are fp32.

    It is the largest divisor of the last dimension in [64, 256], so that no block crosses a row, and shards of rows
    hold whole blocks. Vectors and tensors with fewer than 4,096 values are not worth 8 bits.
    """
    if len(shape) < 2 or math.prod(shape) < SMALLEST_8BIT:
        return None
    return next((size for size in range(BLOCK_SIZE, SMALLEST_BLOCK - 1, -1) if shape[-1] % size == 0), None)


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
    block: int = BLOCK_SIZE,
) -> None:
    mean = dequantize_blocks(mean_codes, mean_scales, signed, block)
    square = dequantize_blocks(square_codes, square_scales, unsigned, block)
    mean, square = _update_weight(weight, gradient, mean, square, noise_seed, is_applied, f)
    codes, scales = quantize_blocks(mean, signed, block)
    _put(mean_codes, codes, is_applied)
    _put(mean_scales, scales, is_applied)
    codes, scales = quantize_blocks(square, unsigned, block)
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


def _put(target: Tensor, new: Tensor, is_applied: Tensor) -> None:
    # not a product with 0 or 1: a skipped value may be infinite
    target.copy_(torch.where(is_applied > 0, new, target))


def random_bits(like: Tensor, noise_seed: Tensor) -> Tensor:
    """Return 16 random bits per element as int64 (n,), the shape of `like`, from `noise_seed` and the element's index.

    `noise_seed` is a 0-d int64 tensor in [0, 2^32). The bits are a counter hashed by two rounds of shift, xor and
    multiply, so there is no state to save and they are the same on every device.
    """
    return hash_32((torch.arange(like.numel(), device=like.device) + noise_seed) & LOW_32) & 0xFFFF


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


def quantize_blocks(values: Tensor, table: Tensor, block: int = BLOCK_SIZE) -> tuple[Tensor, Tensor]:
    """Quantize fp32 `values` (n,) to uint8 codes (n,) for the nearest entries of `table`, and fp32 scales (n / block,).

    A block's scale is its largest magnitude; n must be a multiple of `block`.
    """
    blocks = values.view(-1, block)
    scales = blocks.abs().amax(1)
    boundaries = (table[1:] + table[:-1]) / 2
    # clamp, so that a block of zeros is not divided by zero
    codes = torch.bucketize(blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None], boundaries)
    return codes.view(-1).to(torch.uint8), scales


def dequantize_blocks(codes: Tensor, scales: Tensor, table: Tensor, block: int = BLOCK_SIZE) -> Tensor:
    """Return the fp32 values (n,) that the codes and scales of `quantize_blocks` stand for."""
    return (table[codes.to(torch.int32)].view(-1, block) * scales[:, None]).view(-1)


def adam_options(config: OptimConfig) -> dict[str, Any]:
    """Return the settings of the section by the names of torch's AdamW."""
    return {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}


def make(groups: ParamGroups, config: OptimConfig, options: OptimizerOptions) -> AdamW8bit:
    """Return AdamW with moments in 8 bits."""
    return AdamW8bit(groups, eight_bit=True, seed=options.seed, offset_of=options.offset_of, **adam_options(config))
