"""A run's resumable state as named tensors and plain facts: the part that this rank writes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flatout.checkpoint.optimizer_state import optimizer_state
from flatout.checkpoint.replicas import refuse_drift
from flatout.checkpoint.write import Snapshot
from flatout.errors import NumericError
from flatout.io.redact import redacted
from flatout.parallel.shards import global_tensors, local_state
from flatout.parallel.strategies.protocol import PartitionedOptimizer
from flatout.train.state import Run


def take_snapshot(run: Run) -> Snapshot:
    """Collect everything the next step depends on; tensors are not copied, so write them before the next update.

    Collective. Raises NumericError on every rank if a tensor is not finite, as it could not be resumed from, and
    CheckpointError if replicas differ.
    """
    keeper = run.optimizer if isinstance(run.optimizer, PartitionedOptimizer) else None
    state = {
        "model": global_tensors(run.named_parameters, keep=run.rank.is_first, gather=keeper.weight)
        if keeper
        else {name: parameter.detach() for name, parameter in run.named_parameters.items()},
        "optimizer": optimizer_state(run.optimizer, run.named_parameters, keep=run.rank.is_first),
    }
    run.saver.wait()  # its thread communicates over the same group
    if keeper is None:
        refuse_drift(state, run.checkpoints.group)
    tensors, places = local_state(state, run.rank.index)
    _require_finite(run, {name: tensor for kind in tensors.values() for name, tensor in kind.items()})
    return Snapshot(
        step=run.progress.step,
        tensors=tensors,
        facts={
            "config": redacted(run.config.model_dump(mode="json")),
            "fingerprints": dict(run.fingerprints),
            "progress": run.progress.to_json(),
            "scaler": run.scaler.state_dict(),
            "micro_batch_caps": run.checkpoints.group.all_gather(run.micro_batch_cap.num_tokens),
        },
        places=places,
    )


@torch.no_grad()
def _require_finite(run: Run, tensors: Mapping[str, Tensor]) -> None:
    """Check the state, as an update can overflow even with a finite gradient (say, with a learning rate of 1e308)."""
    held = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    # the infinity norm is not finite if any value is not, and allocates no tensor-sized temporary
    largest = torch._foreach_norm(list(held.values()), torch.inf) if held else ()
    values = torch.stack([value.to(run.device, torch.float64) for value in (*largest, torch.zeros(()))])
    is_bad = ~values.isfinite()
    num_bad = int(run.strategy.sum_values(is_bad.sum(dtype=torch.float64)[None]).item())
    if num_bad:
        names = [name for name, bad in zip(held, is_bad.tolist(), strict=False) if bad]
        where = f"{names[0]} ({num_bad} tensors)" if names else f"{num_bad} tensors of other ranks"
        raise NumericError(
            f"after step {run.progress.step}: {where} is not finite, so this state was not saved; earlier checkpoints "
            "are whole; lower optim.lr, or go on from one of them"
        )
