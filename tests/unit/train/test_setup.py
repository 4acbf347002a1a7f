"""The order of a run's start-up, where it matters."""

from pathlib import Path
from typing import Any

import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

from flatout.parallel.rank import Rank
from flatout.track.record import Trackers
from flatout.train import setup
from flatout.train.checkpoint import Checkpoints
from flatout.train.planning import plan_run


@pytest.mark.parametrize("storage", ["model", "nf4", "fp8"])
def test_no_module_is_called_before_the_compiler_is_ready(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """While it traces, `nn.Module.__call__` is torch.fx's in every thread, and a call of the model's ends the run."""
    happened: list[str] = []
    monkeypatch.setattr(setup, "warm_compiler", lambda *_: lambda: happened.append("ready"))
    config = tiny.config(tmp_path / "run", f"base.storage={storage}")
    planned = plan_run(config, Trackers(), Rank())
    checkpoints = Checkpoints(tmp_path, keep=1, on_event=lambda kind, facts: None)
    hook = register_module_forward_pre_hook(lambda *_: happened.append("call"))
    try:
        setup.set_up(config, planned, checkpoints, None, Trackers(), Rank())
    finally:
        hook.remove()
    assert happened[0] == "ready"
    assert happened.count("ready") == 1
    assert "call" in happened
