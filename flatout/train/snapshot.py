"""A run's resumable state as named tensors and plain facts."""

from __future__ import annotations

from flatout.train.checkpoint import Snapshot
from flatout.train.optim import optimizer_state
from flatout.train.rng import rng_state
from flatout.train.state import Run


def take_snapshot(run: Run) -> Snapshot:
    """Everything that the next step depends on; tensors are the live ones, written before the next update."""
    return Snapshot(
        step=run.progress.step,
        tensors={
            "model": {name: parameter.detach() for name, parameter in run.named_parameters.items()},
            "optimizer": optimizer_state(run.optimizer, run.named_parameters),
            f"rng-{run.rank.index}": rng_state(run.device),
        },
        facts={
            "config": run.config.model_dump(mode="json"),
            "fingerprints": dict(run.fingerprints),
            "progress": run.progress.to_json(),
            "scaler": run.scaler.state_dict(),
        },
    )
