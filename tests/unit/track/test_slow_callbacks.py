"""A callback that does not return is named while it holds the run; and what a killed process left is cleared."""

import time

import pytest

from flatout.io import bounded_wait
from flatout.track.callback import Callback
from flatout.track.record import StepRecord
from flatout.trainer.run import train


class Holding(Callback):
    """Holds one step until somebody has said so; `said` are the lines on stderr."""

    def __init__(self, said: list[str], waits: bool) -> None:
        self.said, self.waits = said, waits

    def on_step(self, record: StepRecord) -> None:
        until_s = time.monotonic() + 600
        while self.waits and record.step == 2 and not self.said and time.monotonic() < until_s:
            time.sleep(0.01)


@pytest.mark.parametrize("waits", [True, False])
def test_a_run_in_one_process_says_which_callback_it_waits_for(tiny, tmp_path, monkeypatch, waits):
    said: list[str] = []
    monkeypatch.setattr(bounded_wait, "to_stderr", said.append)
    # a quick callback of a machine ten times slower stays below the bound
    monkeypatch.setattr(bounded_wait, "NOTICE_AFTER_S", 0.2 if waits else 600.0)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in (".end.json.tmp-0123abcd", ".own.json", "end.json.tmp-0123abcd"):
        (run_dir / name).write_text("{")
    train(tiny.config(run_dir, batch={"max_steps": 3}), callbacks=[Holding(said, waits)])
    own = [line for line in said if "callback Holding" in line]
    assert len(own) == waits
    assert all(
        line.startswith("the run waits for on_step of callback Holding, for 0 s so far, now at ") for line in own
    )
    assert sorted(path.name for path in run_dir.glob("*own*")) == [".own.json"]
    assert not (run_dir / ".end.json.tmp-0123abcd").exists()
    assert (run_dir / "end.json.tmp-0123abcd").exists()
