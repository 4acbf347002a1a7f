"""Each weight is updated as soon as its gradient is complete, so that gradients never exist together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from flatout.config.schema import Config
from flatout.errors import UsageError
from flatout.parallel.rank import Rank
from flatout.plan.steps import RunPlan
from flatout.train.optim import set_lr


class BackwardUpdate:
    """Hooks that update a weight in the backward pass and free its gradient: `full.update: backward`.

    The method of LOMO (Lv et al. 2023, arXiv:2306.09782) with any optimizer. The result is that of an ordinary update
    without clipping, to the bit: a weight's hook runs once its whole gradient is there, tied uses included, and no
    operation of the backward pass reads the weight after that. Use it as

        update.start(lr); loss.backward(); norm = update.grad_norm()
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._squares: list[Tensor] = []
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._update) for parameter in parameters]

    def start(self, lr: float) -> None:
        """Before the backward pass of a step: the learning rate of its updates."""
        set_lr(self._optimizer, lr)
        self._squares.clear()

    def grad_norm(self) -> Tensor:
        """After the backward pass: the global L2 norm of its gradients, 0-d fp32 (fp64 for fp64 gradients)."""
        return torch.stack(self._squares).sum().sqrt()

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _update(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        wide = torch.promote_types(parameter.grad.dtype, torch.float32)
        self._squares.append(torch.linalg.vector_norm(parameter.grad, dtype=wide).square())
        # no other parameter has a gradient now, so a step of all is an update of this one
        self._optimizer.step()
        parameter.grad = None


def check_backward_update(config: Config, plan: RunPlan, rank: Rank) -> None:
    """Raise UsageError unless weights can be updated in the backward pass: one micro-batch of one process a step.

    Every step of the plan is looked at unless the longest samples together fit one micro-batch.
    """
    if rank.world > 1:
        raise UsageError(
            f"full.update: backward updates before ranks could sum gradients; got {rank.world} ranks, "
            "use one or full.update: step"
        )
    if config.model.precision == "fp16":
        raise UsageError("full.update: backward cannot unscale gradients; got model.precision fp16, use bf16 or fp32")
    lengths = plan.samples.lengths
    count = min(plan.batch.samples_per_step, len(lengths))
    if int(np.partition(lengths, -count)[-count:].sum()) <= plan.layout.micro_batch_tokens:
        return
    for step in plan.steps():
        if (num_batches := len(step.ranks[0])) > 1:
            raise UsageError(
                f"full.update: backward needs one micro-batch a step; step {step.index + 1} has {num_batches} of "
                f"{step.num_tokens:,} tokens together; raise batch.micro_batch_tokens to that, lower "
                "batch.samples_per_step, or use full.update: step"
            )
