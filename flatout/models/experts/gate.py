"""The activation between an expert's two products, with its derivative, recognized by measuring the model's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.kernels.moe import Routing, swiglu, swiglu_backward

_GELU = {"gelu": "none", "gelu_tanh": "tanh"}
# the names that transformers' experts give to the bound of their products, and to the slope of their sigmoid
_LIMITS, _SLOPES = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")


@dataclass(frozen=True, slots=True)
class Gate:
    """h = act(min(g, limit)) * (clamp(u, -limit, limit) + shift), or act(g) without `gated`.

    g and u are the halves of a row, or alternate in it if `interleaved`. `act` is x sigmoid(slope x), gelu, gelu_tanh,
    relu or relu2. `custom` replaces all of that by a function of the row.
    """

    act: str = "silu"
    slope: float = 1.0
    shift: float = 0.0
    limit: float | None = None
    gated: bool = True
    interleaved: bool = False
    custom: Callable[[Tensor], Tensor] | None = None

    @property
    def bound(self) -> float:
        """The limit, infinite without one."""
        return math.inf if self.limit is None else self.limit

    @property
    def name(self) -> str:
        """The activation's name for the console."""
        return self.act if self.custom is None else "of the model's own code"

    @property
    def is_swiglu(self) -> bool:
        """Whether this is silu(g) * u of separate halves, which has kernels of its own."""
        return self == Gate()

    def __call__(self, rows: Tensor) -> Tensor:
        """Return h (S, I) of `rows` (S, 2 I), or (S, I) without a gate."""
        if self.custom is not None:
            return self.custom(rows)
        gate, up = self._halves(rows)
        values = self._activate(gate)
        return (values if up is None else values * (up.clamp(-self.bound, self.bound) + self.shift)).to(rows.dtype)

    def forward(self, rows: Tensor, routing: Routing, in_scale: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
        """Return h of sorted `rows`, and options for the product with it: h in float8, if a kernel makes that too.

        `in_scale` fp32 (E, I) are the factors of h in a float8 product, if there are any.
        """
        if not self.is_swiglu:
            return self(rows), {}
        hidden, *quantized = swiglu(rows, routing, in_scale)
        return hidden, {"quantized": quantized} if quantized else {}

    def weighted_backward(
        self, rows: Tensor, grad: Tensor, row_weights: Tensor, routing: Routing, in_scale: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Return h again, the gradients of `rows` and of `row_weights` (S,), and options for the product with `rows`'.

        `grad` (S, I) is the gradient of the weighted h, before it is multiplied by the weights; `in_scale` fp32
        (E, 2 I) are as in `forward`, for the gradient of `rows`.
        """
        if self.is_swiglu:
            hidden, rows_grad, weights_grad, *quantized = swiglu_backward(rows, grad, row_weights, routing, in_scale)
            return hidden, rows_grad, weights_grad, {"quantized": quantized} if quantized else {}
        hidden, wide = self(rows), torch.promote_types(rows.dtype, torch.float32)
        weights_grad = (hidden.to(wide) * grad.to(wide)).sum(1)
        return hidden, self.backward(rows, grad * row_weights.to(grad.dtype)[:, None]), weights_grad, {}

    def backward(self, rows: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of `rows` from that of h, `grad` (S, I)."""
        if self.custom is not None:
            return torch.func.vjp(self.custom, rows)[1](grad)[0]
        gate, up = self._halves(rows)
        grad = grad.to(gate.dtype)
        if up is None:
            return self._activate_backward(gate, grad).to(rows.dtype)
        both = [
            self._activate_backward(gate, grad * (up.clamp(-self.bound, self.bound) + self.shift)),
            grad * self._activate(gate),
        ]
        if self.limit is not None:
            both[1] = both[1].masked_fill(up.abs() > self.limit, 0)
        joined = torch.stack(both, -1).flatten(-2) if self.interleaved else torch.cat(both, -1)
        return joined.to(rows.dtype)

    def _halves(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if not self.gated:
            return wide, None
        if self.interleaved:
            return wide[..., ::2], wide[..., 1::2]
        gate, up = wide.chunk(2, -1)
        return gate, up

    def _activate(self, x: Tensor) -> Tensor:
        x = x if self.limit is None else x.clamp(max=self.limit)
        if self.act == "silu":
            return x * torch.sigmoid(x * self.slope)
        if self.act in _GELU:
            return F.gelu(x, approximate=_GELU[self.act])
        return x.relu() if self.act == "relu" else x.relu().square()

    def _activate_backward(self, x: Tensor, grad: Tensor) -> Tensor:
        if self.limit is not None:
            grad, x = grad.masked_fill(x > self.limit, 0), x.clamp(max=self.limit)
        if self.act == "silu":
            sigmoid = torch.sigmoid(x * self.slope)
            return grad * sigmoid * (1 + x * self.slope * (1 - sigmoid))
        if self.act in _GELU:
            return torch.ops.aten.gelu_backward(grad, x, approximate=_GELU[self.act])
        return grad * (x > 0) * (1 if self.act == "relu" else 2 * x)


def recognize_gate(experts: nn.Module) -> Gate:
    """Return the activation of a transformers experts module, compared with its own on random fp64 rows.

    One that no `Gate` computes becomes `custom`, which differentiates the module's function in the backward pass.
    """
    module: Any = experts
    function: Callable[[Tensor], Tensor] = module._apply_gate if module.has_gate else module.act_fn
    limit = next((float(value) for name in _LIMITS if (value := getattr(module, name, None)) is not None), None)
    slope = next((float(value) for name in _SLOPES if (value := getattr(module, name, None)) is not None), 1.0)
    # on both sides of the limit
    rows = max(limit or 0.0, 4.0) * torch.randn(256, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layout = {"gated": module.has_gate, "interleaved": module.has_gate and not module.is_concatenated}
    expected = function(rows)
    for act, shift, bound in product(("silu", *_GELU, "relu", "relu2"), (0.0, 1.0), dict.fromkeys((limit, None))):
        gate = Gate(act, slope if act == "silu" else 1.0, shift, bound, **layout)
        # some modules compute in fp32
        if torch.allclose(gate(rows), expected, rtol=1e-5, atol=1e-5):
            return gate
    return Gate(custom=function)
