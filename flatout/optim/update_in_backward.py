"""Update each weight as soon as its gradient is complete, so that not all gradients exist at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatout.optim.build import set_lr


class BackwardUpdate:
    """Hooks that update a weight in the backward pass and free its gradient: `full.update: backward`.

    This is LOMO (Lv et al. 2023, arXiv:2306.09782) with any optimizer. The result equals an ordinary update without
    clipping bit for bit: a weight's hook runs once its gradient is complete, including tied uses, and the backward pass
    does not read the weight after that. Use it as

        update.start(lr); loss.backward(); norm = update.finish()
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._updated: set[Tensor] = set()
        self._squares: list[Tensor] = []
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._update) for parameter in parameters]

    def start(self, lr: float) -> None:
        """Set the learning rate of a step's updates; call it before the step's backward pass."""
        set_lr(self._optimizer, lr)
        self._squares.clear()
        self._updated.clear()

    def finish(self) -> Tensor:
        """Return the global L2 norm of the gradients, 0-d fp32 (fp64 for fp64 gradients); call it after backward.

        Weights that the backward pass did not reach are updated with a gradient of zero, as in every strategy.
        """
        for parameter in self._parameters:
            if parameter not in self._updated:
                parameter.grad = torch.zeros_like(parameter)
                self._update(parameter)
        return torch.stack(self._squares).sum().sqrt()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _update(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        wide = torch.promote_types(parameter.grad.dtype, torch.float32)
        self._squares.append(torch.linalg.vector_norm(parameter.grad, dtype=wide).square())
        # no other parameter has a gradient now, so step() updates only this one
        self._optimizer.step()
        parameter.grad = None
        self._updated.add(parameter)
