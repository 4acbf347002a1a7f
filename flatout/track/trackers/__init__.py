"""The table of trackers; nothing of a service is imported before it is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from flatout.config.parallel import STRATEGIES
from flatout.errors import UsageError, install

_FOLDER = "flatout.track.trackers"
# tracker -> the package that it imports, and its class; the extra that installs the package has the tracker's name
TRACKERS = {
    "tensorboard": ("tensorboard", f"{_FOLDER}.tensorboard.TensorBoardTracker"),
    "wandb": ("wandb", f"{_FOLDER}.wandb.WandbTracker"),
    "mlflow": ("mlflow", f"{_FOLDER}.mlflow.MlflowTracker"),
    "comet": ("comet_ml", f"{_FOLDER}.comet.CometTracker"),
    "trackio": ("trackio", f"{_FOLDER}.trackio.TrackioTracker"),
}


def require_installed(names: Iterable[str], *, strategy: str = "auto") -> None:
    """Raise UsageError with every package that these trackers, or the strategy, need and that is missing."""
    wanted = [(f"track.to: {name}", TRACKERS[name][0], name) for name in names]
    if (traits := STRATEGIES.get(strategy)) and traits.package:
        wanted.append((f"strategy: {strategy}", traits.package, strategy))
    missing = []
    for setting, package, extra in wanted:
        spec = find_spec(package)
        # a folder of the package's name, such as wandb's own, has a spec without a file
        if spec is None or spec.origin is None:
            missing.append((f"{setting} needs the package {package}", extra))
    if missing:
        needs, extras = " and ".join(need for need, _ in missing), ",".join(extra for _, extra in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(f"{needs}, which {verb} not installed; {install(extras)}")
