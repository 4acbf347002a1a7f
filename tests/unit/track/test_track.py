import io
import json
import os
import re
import resource
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from flatout.errors import Fix, ResourceError
from flatout.io.file_lock import RunLock
from flatout.track.callback import Callback, Reporter
from flatout.track.console import ConsoleCallback
from flatout.track.record import EvalRecord, PlanFacts, RunEnd, RunStart, StepRecord
from flatout.track.run_folder import RunFolderWriter
from flatout.track.run_log import read_end
from flatout.track.tolerant_stream import TolerantStream

STEP = StepRecord(
    step=1, num_steps=100, epoch=0.1, loss=2.5, token_accuracy=0.25, lr=1e-4, grad_norm=0.5, num_samples=4,
    num_tokens=100, num_label_tokens=60, num_micro_batches=2, tokens_per_s=1000.0, label_tokens_per_s=600.0,
    step_s=0.1, data_wait_s=0.0, flops_per_s=4e14, mfu=0.404, padding_avoided=0.4, balance=1.0, peak_memory_bytes=2**30,
    elapsed_s=0.1,
)  # fmt: skip
EVAL = EvalRecord(step=1, eval_loss=2.0, eval_token_accuracy=0.5, num_label_tokens=60, is_best=True, eval_s=0.2)

START = RunStart(
    name="x", folder="x", method="lora", model="tiny", data="chats", started_at=1.0, first_started_at=1.0,
    resumed_step=None, num_ranks=2, device="cpu", gpus=(), dtype="float32", strategy="ddp", num_parameters=10,
    num_trained_parameters=1, model_text="", versions={}, settings={},
    plan=PlanFacts(100, 50, 0, 4, 700, 2.0, 1000, 600, 0.4, 1.0, None, (0, 10), (50,), ()),
)  # fmt: skip
END = RunEnd("complete", 0, 1.0)


def test_run_folder_keeps_records_events_and_log(tmp_path):
    reporter = Reporter(RunFolderWriter(tmp_path / "run"))
    reporter.stage("plan", "100 steps")
    reporter.record(STEP)
    reporter.record(EVAL)
    reporter.event("skipped", {"step": 3, "why": "no label tokens"})
    # readable before close: a killed run keeps what it told
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in metrics] == ["step", "eval"]
    assert metrics[0]["loss"] == 2.5
    (event,) = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert (event["kind"], event["step"], event["why"]) == ("skipped", 3, "no label tokens")
    assert "100 steps" in (tmp_path / "run" / "train.log").read_text()
    reporter.end(END)
    again = Reporter(RunFolderWriter(tmp_path / "run"))
    again.record(replace(STEP, step=2))
    again.end(END)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_the_log_is_for_people_and_events_keep_every_fact(tmp_path):
    reporter = Reporter(RunFolderWriter(tmp_path))
    reporter.record(STEP)
    reporter.record(EVAL)
    reporter.event("saved", {"path": "step-1", "staged_s": 0.5, "copied_s": 0.1, "save_s": 0.7})
    log = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(maxsplit=1)[1] for line in log] == [
        "step       1/100  loss 2.5000  acc 25.0%  lr 1.00e-04  norm 0.50  1,000 tok/s  600 label tok/s  MFU 40.4%  "
        "padding avoided 40%  1.00 GiB  0 s left",
        "eval       step 1: loss 2.0000  accuracy 50.0% (best)",
        "saved      step-1 in 0.7 s",
    ]
    assert json.loads((tmp_path / "events.jsonl").read_text())["staged_s"] == 0.5


def test_a_disk_that_refuses_lines_is_told_once_and_once_it_is_over(tmp_path):
    told: list[str] = []
    reporter = Reporter(RunFolderWriter(tmp_path, told.append))
    found = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, found[1]))
    try:
        for _ in range(3):
            reporter.record(STEP)
            reporter.event("skipped", {"why": "x" * 200})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, found)
    (first,) = told
    assert "metrics.jsonl: File too large; training continues, but lines are lost until it can be written" in first
    reporter.record(STEP)
    reporter.event("skipped", {})
    assert len(told) == 2
    assert "writable again; 12 lines were lost" in told[1]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_folder_that_is_deleted_is_made_again_and_one_that_is_taken_is_left_alone(tmp_path):
    folder = tmp_path / "run"
    with RunLock(folder) as lock:
        reporter = Reporter(RunFolderWriter(folder, keep_folder=lock.keep))
        reporter.record(STEP)
        shutil.rmtree(folder)
        reporter.record(replace(STEP, step=2))
        assert json.loads((folder / "metrics.jsonl").read_text())["step"] == 2
        with pytest.raises(ResourceError, match="is locked by"), RunLock(folder):
            pass
        shutil.rmtree(folder)
        with RunLock(folder):
            with pytest.raises(ResourceError, match=r"was deleted during this run, and now .* is locked by"):
                reporter.record(replace(STEP, step=3))
            reporter.event("stopped", {})
            assert [path.name for path in folder.iterdir()] == [".lock"]


def test_passwords_in_addresses_are_shown_to_nobody(tmp_path):
    out = io.StringIO()
    callbacks = Reporter(ConsoleCallback(Console(file=out, width=200)), RunFolderWriter(tmp_path))
    callbacks.stage("tokens", "read https://me:hunter2@host/a.jsonl?part=1&access_token=hunter3&x=2")
    callbacks.event("rows", {"sources": ["s3://key:hunter2@host/b"], "why": {"url": "http://h/?sig=hunter3"}})
    callbacks.end(END)
    written = out.getvalue() + "".join(path.read_text() for path in tmp_path.iterdir())
    assert "hunter" not in written
    assert "https://***@host/a.jsonl?part=1&access_token=***&x=2" in written


def test_failures_are_told_by_whoever_started_the_run():
    out = io.StringIO()
    ConsoleCallback(Console(file=out, width=200)).on_event("stopped", {"exit_code": 6, "why": "no room"})
    assert out.getvalue() == ""


def test_a_reader_that_leaves_and_a_full_disk_end_nothing():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        output = TolerantStream(stream)
        for _ in range(3):
            assert output.write("x" * 100_000) == 100_000
            output.flush()
        assert output.is_unread
        output.flush(is_last=True)
    with open("/dev/full", "w") as stream:  # noqa: PTH123  (a device)
        output = TolerantStream(stream)
        output.write("x" * 100_000)
        output.flush()
        assert not output.is_unread
        output.flush(is_last=True)
    closed = io.StringIO()
    closed.close()
    TolerantStream(closed).write("x")


def test_a_character_that_the_terminal_lacks_is_replaced():
    raw = io.BytesIO()
    output = TolerantStream(io.TextIOWrapper(raw, encoding="ascii"))
    output.write("caf\u00e9 \u2192 ok\n")
    output.flush()
    assert raw.getvalue() == b"caf? ? ok\n"


def shown(is_terminal: bool) -> str:
    out = io.StringIO()
    reporter = Reporter(ConsoleCallback(Console(file=out, force_terminal=is_terminal, width=200)))
    reporter.stage("plan", "[not markup] 100 steps")
    for step in range(1, 101):
        reporter.record(replace(STEP, step=step))
    reporter.record(EVAL)
    reporter.event("saved", {"path": "checkpoints/step-1"})
    reporter.end(END)
    return out.getvalue()


def test_without_a_terminal_a_run_prints_a_bounded_number_of_plain_lines():
    text = shown(is_terminal=False)
    assert "\x1b" not in text
    assert "[not markup] 100 steps" in text
    steps = [line for line in text.splitlines() if line.startswith("step")]
    assert 20 <= len(steps) <= 22
    assert "1/100" in steps[0]
    assert "100/100" in steps[-1]
    assert "eval       step 1: loss 2.0000  accuracy 50.0% (best)" in text
    assert "saved      checkpoints/step-1" in text


def test_on_a_terminal_a_bar_shows_the_figures():
    text = shown(is_terminal=True)
    assert "100/100" in text
    assert "loss 2.5000  0 s left  1,000 tok/s  MFU 40.4%  1.00 GiB" in text


def test_no_utilisation_is_shown_where_no_peak_is_known():
    out = io.StringIO()
    ConsoleCallback(Console(file=out, width=200)).on_step(replace(STEP, mfu=None))
    assert "MFU" not in out.getvalue()
    assert "1,000 tok/s  1.00 GiB" in out.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_lines_of_a_long_run_fit_80_columns(is_terminal):
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=is_terminal, legacy_windows=False)
    reporter = Reporter(ConsoleCallback(console, every_record=True))
    busy = {"tokens_per_s": 98_765.0, "peak_memory_bytes": 120 << 30}
    for step in (1, 5000, 9999):
        reporter.record(replace(STEP, step=step, num_steps=9999, elapsed_s=4.0 * step, **busy))
    reporter.end(END)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n")
    assert max(len(line) for line in plain.splitlines()) <= 80
    assert "120.00 GiB" in plain


def test_every_recorded_step_is_shown_when_asked_for():
    out = io.StringIO()
    reporter = Reporter(ConsoleCallback(Console(file=out, width=80), every_record=True))
    for step in range(10, 1001, 10):
        reporter.record(replace(STEP, step=step, num_steps=1000, eta_s=1000.0 - step))
    lines = out.getvalue().splitlines()
    assert len(lines) == 100
    assert "0:16:30 left" in lines[0]


class Notes(Callback):
    """Notes what it is told, and raises for events named `bad`."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_stage(self, name: str, text: str) -> None:
        self.told.append(name)

    def on_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        self.told.append(kind)
        if kind == "bad":
            raise ValueError(f"cannot take {facts}")

    def on_end(self, end: RunEnd) -> None:
        self.told.append("end")


def test_posted_events_keep_their_order_and_none_is_lost_at_the_end():
    notes = Notes()
    reporter = Reporter(notes)
    for number in range(50):
        reporter.post(f"event {number}", {})
        if number % 10 == 0:
            reporter.stage(f"stage {number}", "")
            assert notes.told[-2:] == [f"event {number}", f"stage {number}"]
    reporter.end(END)
    assert [told for told in notes.told if told.startswith("event")] == [f"event {number}" for number in range(50)]
    assert notes.told[-1] == "end"
    reporter.post("late", {})
    reporter.event("late", {})
    assert notes.told[-1] == "end"


def test_a_callback_that_raises_ends_the_run_with_the_next_report_which_all_callbacks_get():
    notes, other = Notes(), Notes()
    reporter = Reporter(notes, other)
    reporter.post("bad", {})
    with pytest.raises(ValueError, match="cannot take"):
        reporter.event("bad", {})
    reporter.stage("model", "")
    reporter.post("bad", {})
    with pytest.raises(ValueError, match="cannot take"):
        reporter.end(END)
    assert notes.told == other.told == ["bad", "bad", "model", "bad", "end"]


def test_how_a_run_ends_is_written_early_and_a_later_end_has_precedence(tmp_path):
    """By a rank that may not live to its end; one that has not started leaves the folder as it was."""
    folder = RunFolderWriter(tmp_path)
    lost = RunEnd("failed", 7, 2.0, "rank 1 died", fixes=(Fix({"lora.targets": ["q_proj"], "gpus": None}, "fewer"),))
    folder.write_end(lost)
    assert not (tmp_path / "end.json").exists()
    folder.on_start(START)
    folder.write_end(lost)
    assert read_end(tmp_path) == lost
    written = json.loads((tmp_path / "end.json").read_text())
    (tmp_path / "end.json").write_text(json.dumps({name: written[name] for name in written.keys() - {"fixes"}}))
    assert read_end(tmp_path) == replace(lost, fixes=())  # as older versions wrote it
    folder.on_step(STEP)
    folder.on_end(END)
    folder.write_end(lost)
    assert read_end(tmp_path) == END
    again = RunFolderWriter(tmp_path)
    assert read_end(tmp_path) == END
    again.on_start(START)
    assert read_end(tmp_path) is None
