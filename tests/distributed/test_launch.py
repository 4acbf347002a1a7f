"""`flatout train run.yaml` with `gpus`: real launchers, real ranks."""

import signal
from pathlib import Path
from typing import Any

import pytest
from launching import DEADLINE_S, launch, settings, wait_for_steps

from flatout.launch.reports import RankReport


def test_two_jobs_at_once_one_right_one_wrong(tiny: Any, tmp_path: Path, metrics_of: Any) -> None:
    """The right one equals one process; the wrong one exits with its own code, at once, and shows why."""
    from flatout.train.run import train

    rows = tmp_path / "bad.jsonl"
    rows.write_text('{"messages": [{"role": "user"}]}\n')
    data = {"name": "bad", "root": str(tmp_path / "data"), "sources": [{"path": str(rows)}]}
    right = launch(tiny.config(tmp_path / "right", **settings(tiny)), tmp_path / "a")
    wrong = launch(tiny.config(tmp_path / "wrong", **settings(tiny, data=data)), tmp_path / "b")
    train(tiny.config(tmp_path / "alone", **settings(tiny, gpus=None)))
    output = wrong.communicate(timeout=DEADLINE_S)[0]
    assert wrong.returncode == 3, output
    assert "bad.jsonl" in output
    assert [path.name for path in sorted((tmp_path / "wrong" / "logs").iterdir())] == ["attempt-0", "latest"]
    output = right.communicate(timeout=DEADLINE_S)[0]
    assert right.returncode == 0, output
    assert "DDP: 2 rank(s) on cpu" in output
    for a, b in zip(metrics_of(tmp_path / "alone"), metrics_of(tmp_path / "right"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-10)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-10)
    folder = tmp_path / "right" / "logs" / "attempt-0"
    assert [report.exit_code for report in RankReport.read_all(folder)] == [0, 0]
    assert (folder / "rank-0.log").read_text() == output
    assert (folder / "rank-1.log").exists()


def test_a_signal_to_the_launcher_saves_once(tiny: Any, tmp_path: Path) -> None:
    """SIGTERM to `flatout train`: every rank exits 75, one checkpoint; `gpus: [1]` goes on in one process."""
    batch = {"samples_per_step": 7, "micro_batch_tokens": 600, "max_steps": 4000}
    process = launch(tiny.config(tmp_path / "run", **settings(tiny, batch=batch)), tmp_path)
    wait_for_steps(tmp_path / "run", 3)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 75, output
    codes = [report.exit_code for report in RankReport.read_all(tmp_path / "run" / "logs" / "attempt-0")]
    assert codes == [75, 75]
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert len(saved) == 1
    stopped_at = int(saved[0].removeprefix("step-"))
    shorter = settings(tiny, gpus=[1], batch={**batch, "max_steps": stopped_at + 1})
    alone = tiny.config(tmp_path / "run", **shorter, checkpoint={"allow_change": ["batch.max_steps"]})
    process = launch(alone, tmp_path)
    output = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 0, output
    assert f"from step {stopped_at}" in output
    assert "Single: 1 rank(s)" in output
