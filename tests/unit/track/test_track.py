import io
import json
import stat
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from flatout.track.console import ConsoleTracker
from flatout.track.jsonl import RunFolderTracker
from flatout.track.record import EvalRecord, StepRecord, Trackers

STEP = StepRecord(
    step=1, num_steps=100, epoch=0.1, loss=2.5, token_accuracy=0.25, lr=1e-4, grad_norm=0.5, num_samples=4,
    num_tokens=100, num_label_tokens=60, num_micro_batches=2, tokens_per_s=1000.0, label_tokens_per_s=600.0,
    step_s=0.1, data_wait_s=0.0, flops_per_s=4e14, mfu=0.404, padding_avoided=0.4, balance=1.0, peak_memory_bytes=2**30,
    elapsed_s=0.1,
)  # fmt: skip
EVAL = EvalRecord(step=1, eval_loss=2.0, eval_token_accuracy=0.5, num_label_tokens=60, is_best=True, eval_s=0.2)


def test_run_folder_keeps_records_events_and_log(tmp_path: Path) -> None:
    tracker = RunFolderTracker(tmp_path / "run")
    tracker.stage("plan", "100 steps")
    tracker.record(STEP)
    tracker.record(EVAL)
    tracker.event("skipped", {"step": 3, "why": "no label tokens"})
    # readable before close: a killed run keeps what it told
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in metrics] == ["step", "eval"]
    assert metrics[0]["loss"] == 2.5
    (event,) = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert (event["kind"], event["step"], event["why"]) == ("skipped", 3, "no label tokens")
    assert "100 steps" in (tmp_path / "run" / "train.log").read_text()
    tracker.close()
    again = RunFolderTracker(tmp_path / "run")
    again.record(replace(STEP, step=2))
    again.close()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_run_folder_is_the_owners_only(tmp_path: Path) -> None:
    RunFolderTracker(tmp_path / "run").close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").iterdir()}
    assert modes == dict.fromkeys(("metrics.jsonl", "events.jsonl", "train.log"), 0o600)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def shown(is_terminal: bool) -> str:
    out = io.StringIO()
    tracker = ConsoleTracker(Console(file=out, force_terminal=is_terminal, width=200))
    tracker.stage("plan", "[not markup] 100 steps")
    for step in range(1, 101):
        tracker.record(replace(STEP, step=step))
    tracker.record(EVAL)
    tracker.event("saved", {"path": "checkpoints/step-1"})
    tracker.close()
    return out.getvalue()


def test_without_a_terminal_a_run_prints_a_bounded_number_of_plain_lines() -> None:
    text = shown(is_terminal=False)
    assert "\x1b" not in text
    assert "[not markup] 100 steps" in text
    steps = [line for line in text.splitlines() if line.startswith("step")]
    assert 20 <= len(steps) <= 22
    assert "1/100" in steps[0]
    assert "100/100" in steps[-1]
    assert "eval       step 1: loss 2.0000  accuracy 50.0% (best)" in text
    assert "saved      path checkpoints/step-1" in text


def test_on_a_terminal_a_bar_shows_the_figures() -> None:
    text = shown(is_terminal=True)
    assert "100/100" in text
    assert "1,000 tok/s (600 label)  MFU 40.4%  padding" in text
    assert "padding avoided 40%" in text


def test_no_utilisation_is_shown_where_no_peak_is_known() -> None:
    out = io.StringIO()
    ConsoleTracker(Console(file=out, width=200)).record(replace(STEP, mfu=None))
    assert "MFU" not in out.getvalue()
    assert "(600 label)  padding" in out.getvalue()


def test_trackers_tell_all(tmp_path: Path) -> None:
    folders = [RunFolderTracker(tmp_path / name) for name in ("a", "b")]
    both = Trackers(*folders)
    both.record(EVAL)
    both.close()
    assert (tmp_path / "a" / "metrics.jsonl").read_text() != ""
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == (tmp_path / "b" / "metrics.jsonl").read_text()
