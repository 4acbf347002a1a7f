"""The table of trackers; nothing of a service is imported before it is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from flatout.errors import UsageError

_FOLDER = "flatout.track.trackers"
# tracker -> the package that it imports, and its class; the extra that installs the package has the tracker's name
TRACKERS = {
    "tensorboard": ("tensorboard", f"{_FOLDER}.tensorboard.TensorBoardTracker"),
    "wandb": ("wandb", f"{_FOLDER}.wandb.WandbTracker"),
    "mlflow": ("mlflow", f"{_FOLDER}.mlflow.MlflowTracker"),
    "comet": ("comet_ml", f"{_FOLDER}.comet.CometTracker"),
    "trackio": ("trackio", f"{_FOLDER}.trackio.TrackioTracker"),
}


def require_installed(names: Iterable[str]) -> None:
    """Raise UsageError for a tracker whose package is missing."""
    for name in names:
        package, _ = TRACKERS[name]
        spec = find_spec(package)
        # a folder of the package's name, such as wandb's own, has a spec without a file
        if spec is None or spec.origin is None:
            raise UsageError(
                f"track.to: {name} needs the package {package}, which is not installed; pip install 'flatout[{name}]'"
            )
