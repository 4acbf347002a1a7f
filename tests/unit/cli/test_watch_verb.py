import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flatout.cli import watch
from flatout.cli.main import main
from flatout.errors import ResourceError
from flatout.io.file_lock import RunLock, launcher_folder
from flatout.track.record import EvalRecord, RunEnd, StepRecord
from flatout.track.run_folder import RunFolderWriter
from flatout.track.run_log import read_run

STEP = StepRecord(
    step=1, num_steps=40, epoch=0.1, loss=2.5, token_accuracy=0.25, lr=1e-4, grad_norm=0.5, num_samples=4,
    num_tokens=100, num_label_tokens=60, num_micro_batches=2, tokens_per_s=1000.0, label_tokens_per_s=600.0,
    step_s=0.1, data_wait_s=0.01, flops_per_s=4e14, mfu=0.4, padding_avoided=0.4, balance=1.0,
    peak_memory_bytes=2**31, elapsed_s=0.1, num_ranks=2, rank_busy_s=(0.05, 0.1), forward_s=0.03, backward_s=0.05,
    memory_bytes=2**30, eta_s=75.0,
)  # fmt: skip


@pytest.fixture
def writer(tmp_path):
    """A run of two ranks that no process trains any more, after 20 of 40 steps."""
    folder = RunFolderWriter(tmp_path / "run")
    for step in range(1, 21):
        folder.on_step(replace(STEP, step=step, loss=3 - 0.1 * step))
    folder.on_eval(EvalRecord(10, 2.0, 0.5, 60, True, 0.2))
    folder.on_eval(EvalRecord(20, 1.5, 0.5, 60, True, 0.2))
    folder.on_event("skipped", {"step": 7, "why": "no label tokens"})
    logs = tmp_path / "run" / "logs" / "attempt-0"
    logs.mkdir(parents=True)
    (logs.parent / "latest").symlink_to(logs.name)
    (logs / "rank-1.log").write_text("a warning\x1b[2J of rank 1\n\n")
    return folder


ESCAPE, SHOWN = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e", r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


@pytest.mark.parametrize("verb", ["watch", "report", "repr"])
def test_nothing_that_files_say_controls_the_terminal(writer, tmp_path, verb, capsys):
    from flatout.api.run import Run

    run = tmp_path / "run"
    writer.on_event(f"odd{ESCAPE}", {f"field{ESCAPE}": ESCAPE, "list": [ESCAPE]})
    writer.on_end(RunEnd("failed", 1, 0.0, f"why {ESCAPE}"))
    end = json.loads((run / "end.json").read_text())
    (run / "end.json").write_text(json.dumps({**end, "why": f"why {ESCAPE}"}, ensure_ascii=False))
    (run / ".lock").write_text(json.dumps({"pid": 1, "host": ESCAPE, "since": ESCAPE, "verb": ESCAPE}))
    if verb == "repr":
        print(Run(run))
    else:
        assert main([verb, str(run), *(["--format", "md"] if verb == "report" else [])]) == 0
    said = capsys.readouterr()
    assert SHOWN in said.out
    assert not set(said.out + said.err) & set(ESCAPE) - set("]0;owned[2J31m")


@pytest.fixture
def lock(tmp_path):
    """Held as by a training."""
    with RunLock(tmp_path / "run") as held:
        yield held


def shown(folder: Path, width: int = 60) -> str:
    console = Console(width=width, record=True, file=(folder.parent / "screen").open("w"))
    console.print(watch.view(read_run(folder), width))
    return " ".join(console.export_text().split())


def at_each_pause(monkeypatch: pytest.MonkeyPatch, *acts: Callable[[], Any]) -> None:
    """Instead of waiting for the next look, do the next of `acts`."""
    left = list(acts)
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: left.pop(0)())


def test_a_run_is_drawn_from_its_files_on_60_columns(writer, lock, tmp_path):
    console = Console(width=60, record=True, file=(tmp_path / "screen").open("w"))
    console.print(watch.view(read_run(tmp_path / "run"), 60))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 60
    for shown in ("20/40  0:01:15 left", "1.0000   █", "1.5000   █▁", "best 1.5000, step 20", "MFU 40.0%", "peak 2.0"):
        assert shown in text
    assert "data wait 10% forward 30% backward 50%" in text
    # control characters of a log do not reach the terminal
    assert "0.1 s ██████████  a warning\\x1b[2J of rank 1" in text
    assert "skipped  step 7" in text
    assert "running, last news 0 s ago" in text


def test_news_are_printed_in_a_pipe_until_the_run_ends(writer, lock, tmp_path, monkeypatch, capsys):
    def go_on() -> None:
        for step in range(21, 41):
            writer.on_step(replace(STEP, step=step, loss=1.0))

    at_each_pause(
        monkeypatch, go_on, lambda: None, lambda: writer.on_end(RunEnd("complete", 0, 1.0)), lambda: lock.__exit__()
    )
    assert main(["watch", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    lines = out.splitlines()
    for name in (
        "eval       step 10: loss 2.0000",
        "step       40/40",
        "skipped    step 7",
        "summary    complete, 40 of 40",
    ):
        assert sum(line.startswith(name) for line in lines) == 1
    assert max(len(line) for line in lines if " flatout " not in line) <= 80


def test_a_killed_run_is_shown_as_killed_at_once_and_its_watcher_ends(writer, tmp_path, capsys):
    run = tmp_path / "run"
    # a forked child keeps the lock for longer than the run lives
    code = (
        "import os, sys, time; from pathlib import Path; from flatout.io.file_lock import RunLock\n"
        "RunLock(Path(sys.argv[1])).__enter__()\n"
        "child = os.fork()\nif child: print(child, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert "state running, last news" in shown(run)
            process.kill()
            process.wait()
            assert "state killed, last news" in shown(run)
            assert "but one of its children still holds the lock" in shown(run, 400)
        finally:
            os.kill(child, signal.SIGKILL)
    (run / "config.yaml").write_text("model: {name: m}\n")
    assert main(["watch", str(run)]) == 0
    out = capsys.readouterr().out
    assert "state      killed, last news" in out
    assert "\nsummary    killed, 20 of 40 steps" in out
    assert f"\nnext       flatout train {run}/config.yaml\n" in out


def test_a_run_between_two_attempts_lives_until_its_launcher_ends(writer, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    writer.on_end(RunEnd("failed", 7, 1.0, "rank 1 was lost"))
    with RunLock(launcher_folder(run)) as launcher:
        assert "state running, last news" in shown(run)
        # it would be in the way of the ranks
        for verb, folder in (("track", run), ("doctor", run)):
            with pytest.raises(ResourceError, match=f"is locked by pid {os.getpid()}"), RunLock(folder, verb):
                pass
        at_each_pause(monkeypatch, lambda: None, lambda: launcher.__exit__())
        assert main(["watch", str(run)]) == 0
    out = capsys.readouterr().out
    assert "summary    failed, 20 of 40" in out
    assert "why        rank 1 was lost" in out


def test_a_folder_that_another_verb_holds_is_not_running(writer, tmp_path, capsys):
    run = tmp_path / "run"
    with RunLock(run, "track"):
        assert "state killed" in shown(run)
        assert f"held by pid {os.getpid()} on " in shown(run, 200)
        assert main(["watch", str(run)]) == 0
    assert "(`flatout track`)" in capsys.readouterr().out


def test_of_a_run_on_another_host_is_said_what_is_known(writer, tmp_path, monkeypatch, capsys):
    run, now_s = tmp_path / "run", watch.time.time()
    with RunLock(run):
        held = json.loads((run / ".lock").read_text())
    (run / ".lock").write_text(json.dumps({**held, "host": "node-7"}))
    assert "cannot see the lock of the run on node-7, last news" in shown(run)
    monkeypatch.setattr(watch.time, "time", lambda: now_s + 7200)
    assert main(["watch", str(run)]) == 0
    out = capsys.readouterr().out
    assert "last news 2:00:0" in out
    assert "summary    not ended, 20 of 40" in out


def test_a_run_whose_start_is_damaged_is_watched(writer, lock, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    for text in ("", '{"name": 1}', "[]", '{"name"'):
        (run / "start.json").write_text(text)
        assert "running, last news" in shown(run)
    at_each_pause(monkeypatch, lambda: lock.__exit__())
    assert main(["watch", str(run)]) == 0
    said = capsys.readouterr().out
    assert "summary    damaged, 20 of 40 steps" in said
    assert f"{run / 'start.json'}:" in "".join(said.split())


def test_folders_that_are_no_runs(writer, lock, tmp_path, monkeypatch, capsys):
    run, empty = tmp_path / "run", tmp_path / "empty"
    empty.mkdir()
    assert main(["watch", str(empty)]) == 3
    assert f"error: {empty} is not a run folder" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "absent")]) == 2
    assert f"error: {tmp_path / 'absent'}: no such folder" in capsys.readouterr().err
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").mkdir()
    assert main(["watch", str(run)]) == 3
    assert f"cannot read {run / 'events.jsonl'}: Is a directory" in capsys.readouterr().err
    (run / "events.jsonl").rmdir()
    at_each_pause(monkeypatch, lambda: shutil.rmtree(run))
    assert main(["watch", str(run)]) == 3
    assert f"error: {run} was deleted while it was watched" in capsys.readouterr().err


def test_foreign_lines_are_counted_and_ctrl_c_leaves_the_run_alone(writer, lock, tmp_path, monkeypatch, capsys):
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": "x"}) + '\nnot json\n{"kind": "st')
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "run").iterdir())

    def interrupt() -> None:
        raise KeyboardInterrupt

    at_each_pause(monkeypatch, interrupt)
    assert main(["watch", str(tmp_path / "run")]) == 130
    assert "left " in capsys.readouterr().out
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "run").iterdir()) == before

    def start_over() -> None:
        shutil.rmtree(tmp_path / "run")
        lock.keep()
        RunFolderWriter(tmp_path / "run").on_step(replace(STEP, step=39, loss=7.0))

    # files that became shorter are read from their start
    at_each_pause(monkeypatch, start_over, interrupt)
    assert main(["watch", str(tmp_path / "run")]) == 130
    assert "step       39/40  loss 7.0000" in capsys.readouterr().out
