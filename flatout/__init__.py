"""flatout: exact, planned, flat-out fine-tuning of transformers models. Importing it has no side effects.

run = flatout.train(model="Qwen/Qwen3-0.6B", data="chats.jsonl", lr=1e-4)
run.plot(); run.chat("Hello"); run.merge("merged")
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flatout.api.prepare import build_data as build_data
    from flatout.api.prepare import plan as plan
    from flatout.api.prepare import verify as verify
    from flatout.api.run import Run as Run
    from flatout.api.run import load as load
    from flatout.api.start import train as train
    from flatout.config.optim import OptimizerTraits as OptimizerTraits
    from flatout.config.schema import Config as Config
    from flatout.errors import CheckpointError as CheckpointError
    from flatout.errors import DataError as DataError
    from flatout.errors import Fix as Fix
    from flatout.errors import FlatoutError as FlatoutError
    from flatout.errors import NumericError as NumericError
    from flatout.errors import PeerLostError as PeerLostError
    from flatout.errors import PreemptedError as PreemptedError
    from flatout.errors import ProblemsError as ProblemsError
    from flatout.errors import ResourceError as ResourceError
    from flatout.errors import SecurityError as SecurityError
    from flatout.errors import UsageError as UsageError
    from flatout.objectives.loss_inputs import LabelTokens as LabelTokens
    from flatout.objectives.preference import Answers as Answers
    from flatout.objectives.preference import Preference as Preference
    from flatout.objectives.protocol import Metric as Metric
    from flatout.objectives.protocol import Objective as Objective
    from flatout.track.callback import Callback as Callback

# each with its exit code, and Fix, what mends one
_ERRORS = (
    "CheckpointError", "DataError", "Fix", "FlatoutError", "NumericError", "PeerLostError", "PreemptedError",
    "ProblemsError", "ResourceError", "SecurityError", "UsageError",
)  # fmt: skip
# what each module offers here; imported on first use
_MODULES = {
    "flatout.api.prepare": ("Config", "build_data", "plan", "verify"),
    "flatout.api.run": ("Run", "load"),
    "flatout.api.start": ("train",),
    "flatout.config.optim": ("OptimizerTraits",),
    "flatout.errors": _ERRORS,
    "flatout.objectives.loss_inputs": ("LabelTokens",),
    "flatout.objectives.preference": ("Answers", "Preference"),
    "flatout.objectives.protocol": ("Metric", "Objective"),
    "flatout.track.callback": ("Callback",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    if "torch" not in sys.modules:
        # lazy, as all imports here
        import_module("flatout.environment").let_idle_threads_sleep()
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return [*_MODULE_OF, "__version__"]
