"""A run's resumable state as named tensors and plain facts: what this rank writes of it."""

from __future__ import annotations

from flatout.parallel.shards import share_of, whole_tensors
from flatout.parallel.strategy import KeepsState
from flatout.train.checkpoint import Snapshot
from flatout.train.optim import optimizer_state
from flatout.train.rng import rng_state
from flatout.train.state import Run


def take_snapshot(run: Run) -> Snapshot:
    """Everything that the next step depends on; tensors are the live ones, to be written before the next update."""
    keeper = run.optimizer if isinstance(run.optimizer, KeepsState) else None
    state = {
        "model": whole_tensors(run.named_parameters, keep=run.rank.is_first, gather=keeper.weight)
        if keeper
        else {name: parameter.detach() for name, parameter in run.named_parameters.items()},
        "optimizer": optimizer_state(run.optimizer, run.named_parameters, keep=run.rank.is_first),
    }
    tensors, places = share_of(state, run.rank.index)
    return Snapshot(
        step=run.progress.step,
        tensors={**tensors, f"rng-{run.rank.index}": rng_state(run.device)},
        facts={
            "config": run.config.model_dump(mode="json"),
            "fingerprints": dict(run.fingerprints),
            "progress": run.progress.to_json(),
            "scaler": run.scaler.state_dict(),
        },
        places=places,
    )
