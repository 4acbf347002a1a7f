"""The experts of one layer as transformers' experts interface calls them: two grouped products and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from flatout.kernels.moe import (
    Routing,
    combine,
    grouped_linear,
    grouped_linear_dx,
    grouped_outer,
    register_ops,
    route,
)
from flatout.kernels.moe.reference import row_experts, without_expert
from flatout.models.collectives import RankGroup
from flatout.models.experts.exchange import exchange
from flatout.models.experts.gate import Gate, recognize_gate
from flatout.models.frozen.frozen_experts import DENSE, ExpertsMatmul, FrozenExperts

IMPLEMENTATION = "flatout"
_GATE = "flatout_gate"
# the products with an experts module's trained weights; DENSE without it
MATMUL = "flatout_matmul"
_GROUP = "flatout_group"


def register_experts() -> None:
    """Make `experts_implementation="flatout"` known to transformers."""
    register_ops()
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that transformers' experts interface computes, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "is_transposed")}


def prepare_experts(model: PreTrainedModel) -> str | None:
    """Choose how a model's experts are computed and return a line for the console; None without fused experts."""
    experts = experts_modules(model)
    if not experts or not computes_experts(model):
        return "experts: transformers' own loop over experts" if experts else None
    if not all(map(is_grouped, experts.values())):
        model.set_experts_implementation("eager" if model.dtype == torch.float64 else "grouped_mm")
        return "experts: transformers' own implementation, as each expert's output is normalized"
    for module in experts.values():
        setattr(module, _GATE, recognize_gate(module))
    gates = sorted({getattr(module, _GATE).name for module in experts.values()})
    return f"experts: {len(experts)} layers as grouped products, activation {', '.join(gates)}"


def is_grouped(experts: Any) -> bool:
    """Whether grouped products compute an experts module: asked for, and nothing but the activation is between them."""
    grouped: bool = experts.config._experts_implementation == IMPLEMENTATION
    return grouped and not getattr(experts, "has_post_expert_norm", False)


def computes_experts(model: PreTrainedModel) -> bool:
    """Whether this module computes a model's experts, and so every layer is one graph."""
    modules: Any = experts_modules(model).values()
    return any(module.config._experts_implementation == IMPLEMENTATION for module in modules)


def compute_as_group(experts: nn.Module, group: RankGroup) -> None:
    """Let an experts module, which holds the experts of one rank of the group, compute with the other ranks."""
    setattr(experts, _GROUP, group)


class ExpertsBlock(torch.autograd.Function):
    """Each token's weighted sum of its experts' outputs, down(gate(up(x))), with optional adapters and biases.

    Saves the input and the output of the first product; the activation is computed again in the backward pass, and the
    second product's output is never needed: the gradient of a slot's weight is h_i dot (dy_i W_down). Only gradients
    that are asked for are computed.

    With S rows of k slots for each of T tokens: `x` (T, D), `weights` (T, k), biases (E, 2 I) and (E, D), adapters A
    (E, r, in) and B (E, out, r), whose B is already scaled. `storage` holds the tensors of `up` (E, 2 I, D), then those
    of `down` (E, D, I); only dense ones can be trained. The first has a name of its own: torch's compiler takes a
    forward for one without `ctx` if it is given as many arguments as it has parameters, and two dense ones made it so.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, up_bias: Tensor | None, down_bias: Tensor | None, up_a: Tensor | None,
        up_b: Tensor | None, down_a: Tensor | None, down_b: Tensor | None, order: Tensor, offsets: Tensor,
        inverse: Tensor, tiles: Tensor, gate: Gate, up: ExpertsMatmul, down: ExpertsMatmul, num_up: int,
        first: Tensor, *others: Tensor,
    ) -> Tensor:  # fmt: skip
        routing, storage = Routing(order, offsets, inverse, tiles), (first, *others)
        low_x = None if up_a is None else grouped_linear(x, up_a, routing, gather=True)
        rows = up.forward(x, storage[:num_up], routing, gather=True, low=low_x, low_weight=up_b)
        if up_bias is not None:
            rows = rows + up_bias[row_experts(routing)]
        hidden, float8 = gate.forward(rows, routing, down.input_scale(storage[num_up:], False))
        low_h = None if down_a is None else grouped_linear(hidden, down_a, routing)
        outputs = down.forward(hidden, storage[num_up:], routing, low=low_h, low_weight=down_b, **float8)
        if down_bias is not None:
            outputs = outputs + down_bias[row_experts(routing)]
        ctx.save_for_backward(x, weights, down_bias, up_a, up_b, down_a, down_b, *routing, rows, low_x, low_h, *storage)
        ctx.gate, ctx.up, ctx.down, ctx.num_up = gate, up, down, num_up
        return combine(outputs, routing, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, down_bias, up_a, up_b, down_a, down_b, *rest = ctx.saved_tensors
        order, offsets, inverse, tiles, rows, low_x, low_h, *storage = rest
        routing, (out_grad,), needs_grad = Routing(order, offsets, inverse, tiles), grads, ctx.needs_input_grad
        out_grad = out_grad.contiguous()
        up_storage, down_storage = storage[: ctx.num_up], storage[ctx.num_up :]
        k = weights.shape[1]
        grads_in: list[Tensor | None] = [None] * len(needs_grad)
        # unlike indexing, this takes int32 as it is
        row_weights = weights.flatten().index_select(0, order).to(x.dtype)[:, None]

        # the second product; out_grad is not multiplied by the weights yet
        low = None if down_b is None else grouped_linear_dx(out_grad, down_b, routing, gather=True)
        hidden_grad = ctx.down.backward(out_grad, down_storage, routing, gather=True, low=low, low_weight=down_a)
        hidden, rows_grad, by_row, float8 = ctx.gate.weighted_backward(
            rows, hidden_grad, row_weights[:, 0], routing, ctx.up.input_scale(up_storage, True)
        )
        if needs_grad[1]:
            grads_in[1] = _weights_grad(weights, routing, by_row, out_grad, down_bias)
        if needs_grad[-1]:
            grads_in[-1] = grouped_outer(hidden * row_weights, out_grad, routing, gather_dy=True)
        if needs_grad[3]:
            grads_in[3] = _bias_grad(row_weights, out_grad, routing, gather_dy=True)
        if low is not None and needs_grad[6]:
            grads_in[6] = grouped_outer(hidden, low * row_weights, routing)
            grads_in[7] = grouped_outer(low_h * row_weights, out_grad, routing, gather_dy=True)
        # the first product
        low = None if up_b is None else grouped_linear_dx(rows_grad, up_b, routing)
        if needs_grad[0]:
            grads_in[0] = ctx.up.backward(rows_grad, up_storage, routing, scatter=k, low=low, low_weight=up_a, **float8)
        if needs_grad[-2]:
            grads_in[-2] = grouped_outer(x, rows_grad, routing, gather_x=True)
        if needs_grad[2]:
            grads_in[2] = _bias_grad(torch.ones_like(row_weights), rows_grad, routing)
        if low is not None and needs_grad[4]:
            grads_in[4] = grouped_outer(x, low, routing, gather_x=True)
            grads_in[5] = grouped_outer(low_x, rows_grad, routing)
        return tuple(grads_in)


def _experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **adapters: Any
) -> Tensor:
    """Compute a layer's experts for tokens `hidden_states` (T, D): the function that transformers calls.

    `adapters` are the `ExpertLora` of its parameters by name.
    """
    device = hidden_states.device.type
    autocast = torch.is_autocast_enabled(device) and hidden_states.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if autocast else hidden_states.dtype
    names = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    products = [_product(experts, name, dtype) for name in names]
    biases = [getattr(experts, f"{name}_bias").to(dtype) if experts.has_bias else None for name in names]
    factors = [lora for name in names for lora in (adapters[name].factors(dtype) if name in adapters else (None, None))]
    gate = getattr(experts, _GATE, None) or recognize_gate(experts)
    (up, down), storage = (matmul for matmul, _ in products), [tensor for _, tensors in products for tensor in tensors]

    def compute(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        routing = route(chosen, num_experts)
        return ExpertsBlock.apply(
            x, weights, *biases, *factors, *routing, gate, up, down, len(products[0][1]), *storage
        )

    group: RankGroup | None = getattr(experts, _GROUP, None)
    num_experts = experts.num_experts // (group.size if group else 1)
    x = hidden_states.to(dtype)
    with torch.autocast(device, enabled=False):
        if group is None:
            output = compute(x, top_k_weights, top_k_index)
        else:
            output = exchange(x, top_k_weights, top_k_index, group, num_experts, compute)
    return output.to(hidden_states.dtype)


def _product(experts: Any, name: str, dtype: torch.dtype) -> tuple[ExpertsMatmul, list[Tensor]]:
    weight = getattr(experts, name)
    if isinstance(weight, FrozenExperts):
        return weight.matmul, weight.storage
    # (E, out, in) as a view, whichever way the model stores it
    weight = weight.to(dtype)
    return getattr(experts, MATMUL, DENSE), [weight.transpose(1, 2) if experts.is_transposed else weight]


def _weights_grad(weights: Tensor, routing: Routing, by_row: Tensor, out_grad: Tensor, bias: Tensor | None) -> Tensor:
    """Return the gradient (T, k) of the slots' weights from that of the rows (S,), which lacks the `bias`."""
    if bias is not None:
        wide = by_row.dtype
        tokens = routing.order // weights.shape[1]
        by_row = by_row + (out_grad.to(wide) @ bias.to(wide).T)[tokens, row_experts(routing)]
    by_slot = by_row.index_select(0, routing.inverse).masked_fill(without_expert(routing), 0)
    return by_slot.view_as(weights).to(weights.dtype)


def _bias_grad(scale: Tensor, dy: Tensor, routing: Routing, *, gather_dy: bool = False) -> Tensor:
    """Return each expert's sum of `dy` times its rows' `scale` (S, 1): (E, N)."""
    # eight equal columns, as grouped products need 16 bytes
    return grouped_outer(scale.expand(-1, 8).contiguous(), dy, routing, gather_dy=gather_dy)[..., 0]
