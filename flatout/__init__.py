"""flatout: exact, planned, flat-out fine-tuning of transformers models. Importing it has no side effects.

    run = flatout.train(model="Qwen/Qwen3-0.6B", data="chats.jsonl", lr=1e-4)
    run.plot(); run.chat("Hello"); run.merge("merged")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flatout.api.prepare import build_data, plan, verify
    from flatout.api.run import Run
    from flatout.api.run import Run as load
    from flatout.api.start import train
    from flatout.config.schema import Config
    from flatout.errors import FlatoutError
    from flatout.models.objective import LossSums, Objective, TokenHead
    from flatout.track.callback import Callback

# name -> the module that has it, and its name there; imported on first use
_WHERE = {
    "Callback": ("flatout.track.callback", "Callback"),
    "Config": ("flatout.config.schema", "Config"),
    "FlatoutError": ("flatout.errors", "FlatoutError"),
    "LossSums": ("flatout.models.objective", "LossSums"),
    "Objective": ("flatout.models.objective", "Objective"),
    "Run": ("flatout.api.run", "Run"),
    "TokenHead": ("flatout.models.objective", "TokenHead"),
    "build_data": ("flatout.api.prepare", "build_data"),
    "load": ("flatout.api.run", "Run"),
    "plan": ("flatout.api.prepare", "plan"),
    "train": ("flatout.api.start", "train"),
    "verify": ("flatout.api.prepare", "verify"),
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    module, own_name = _WHERE[name]
    value = getattr(import_module(module), own_name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
