import io
import json
import re
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from flatout.track.callback import Reporter
from flatout.track.console import ConsoleCallback, RankOutput
from flatout.track.record import RoundRecord, RunEnd, StepRecord

STEP = StepRecord(
    step=1, num_steps=100, epoch=0.1, loss=2.5, token_accuracy=0.25, lr=1e-4, grad_norm=0.5, num_samples=4,
    num_tokens=100, num_label_tokens=60, num_micro_batches=2, tokens_per_s=1000.0, label_tokens_per_s=600.0,
    step_s=0.1, data_wait_s=0.0, flops_per_s=4e14, mfu=0.404, padding_avoided=0.4, balance=1.0,
    peak_memory_bytes=2**30, elapsed_s=0.1, eta_s=60.5,
)  # fmt: skip

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Screen:
    """A console with a clock of its own; `line_times` has the second of each line."""

    def __init__(self, *, is_terminal: bool = False, width: int = 80, **options: Any) -> None:
        self.now_s, self.out, self.line_times = 0.0, io.StringIO(), [0.0]
        console = Console(file=self.out, force_terminal=is_terminal, width=width, _environ={"TERM": "xterm"})
        self.callback = ConsoleCallback(console, **options, clock=lambda: self.now_s)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            self.callback.tick()
            self.note()

    def note(self) -> None:
        num_new = self.out.getvalue().count("\n") - len(self.line_times) + 1
        self.line_times += [self.now_s] * num_new

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.out.getvalue()).replace("\r", "\n")

    def longest_silence_s(self, first: int = 0, since_s: float = 0.0) -> float:
        times = [since_s, *self.line_times[first:]]
        return max(after - before for before, after in pairwise(times))


@pytest.mark.parametrize(
    ("num_steps", "step_s", "every_record"),
    [(20_000, 0.5, False), (50, 70.0, False), (400, 8.0, False), (300, 20.0, True)],
)
def test_no_pipe_is_silent_for_a_minute_and_no_phase_of_a_start_for_5_s(num_steps, step_s, every_record):
    screen = Screen(every_record=every_record)
    reporter = Reporter(screen.callback)
    for phase in ("importing torch", "loading weights"):
        reporter.phase(phase)
        screen.pass_time(100)
        reporter.stage("done", phase)
        screen.note()
    # each phase is named within 5 s; then lines become rarer
    assert screen.longest_silence_s() <= 60
    assert [line for line in screen.text.splitlines() if "importing torch" in line] == [
        *(f"...        importing torch {seconds} s" for seconds in (3, 6, 12, 24, 48, 96)),
        "done       importing torch",
    ]
    for step in range(num_steps):
        reporter.phase("step", step + 1)
        screen.pass_time(step_s)
        reporter.record(replace(STEP, step=step + 1, num_steps=num_steps))
        screen.note()
        if step == num_steps // 2:
            began_s, num_before = screen.now_s, len(screen.line_times)
            reporter.phase("saving")
            screen.pass_time(70)
            assert screen.longest_silence_s(num_before, began_s) <= 60
    assert screen.longest_silence_s() <= 60
    assert "...        saving " in screen.text
    assert max(map(len, screen.text.splitlines())) <= 80
    # lines that nobody needs would hide the others
    assert len(screen.line_times) < 75 + screen.now_s / 15


ROUND = RoundRecord(0, 1, 0.25, 64, 0, 48, 300.0, 0.1, 0.25, 20.0, 5.0, 0.0, 900.0, metrics={"reward/number": 0.25})


def test_a_log_of_rounds_has_a_line_each_with_the_reward_and_no_more_signs_of_life_than_one_a_minute():
    """Sampling takes 25 s and scoring 5 s; the last round takes longer than all others."""
    screen = Screen()
    reporter = Reporter(screen.callback)
    for index in range(40):
        for phase, seconds in (("sampling answer", 25 if index < 39 else 200), ("scoring answer", 5)):
            reporter.phase(f"round {index + 1}: {phase}", 3, 64)
            screen.pass_time(seconds)
        reporter.record(replace(ROUND, step=index, round=index + 1, reward=index / 80))
        screen.note()
        metrics = {"clip": 0.0, "entropy": 0.7, "mismatch/k3": 1e-5}
        reporter.record(replace(STEP, step=index + 1, num_steps=40, metrics=metrics))
        screen.note()
    lines = screen.text.splitlines()
    assert [line.split()[2] for line in lines if line.startswith("...")] == ["1:"] * 5 + ["40:"] * 3
    assert lines[-2:] == [
        "round      40: reward 0.4875  300 tokens  10.0% cut  25.0% no signal  900 tok/s",
        "step       40/40  reward 0.4875  entropy 0.7  0:01:00 left  mismatch/k3 1e-05",
    ]
    assert max(map(len, lines)) <= 80
    assert screen.longest_silence_s() <= 60


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"no_signal_share": 1.0}, "all rewards of each group were equal"),
        ({"no_signal_share": 1.0, "num_unscored": 32}, "all rewards of each group were equal or missing"),
        ({"no_signal_share": 1.0, "num_unscored": 64}, "no answer was scored"),
        ({"no_signal_share": 0.5, "num_unscored": 32}, "no group had different rewards of answers that are trained"),
    ],
)
def test_a_round_says_why_it_trains_nothing(figures, why):
    assert replace(ROUND, num_trained=0, **figures).why_untrained == f"{why}, so there was nothing to learn from"


def test_a_run_that_is_watched_shows_a_step_as_often_as_asked():
    screen = Screen(step_line_s=3.0)
    for step in range(400):
        screen.callback.on_phase("step", step + 1)
        screen.pass_time(0.5)
        screen.callback.on_step(replace(STEP, step=step + 1, num_steps=20_000))
        screen.note()
    assert screen.longest_silence_s() <= 3.5


def test_a_terminal_moves_while_a_phase_is_silent_and_forgets_it_afterwards():
    screen = Screen(is_terminal=True)
    reporter = Reporter(screen.callback)
    reporter.phase("loading weights")
    screen.pass_time(2)
    assert screen.text == ""
    screen.pass_time(4)
    assert "loading weights 3 s" in screen.text
    assert "loading weights 6 s" in screen.text
    reporter.phase("tokenizing row", 500, 2000)
    screen.pass_time(10)
    assert "tokenizing row 500 of 2,000 10 s  30 s left" in screen.text
    reporter.end(RunEnd("failed", 1, 0.0))
    # the cursor goes back and the line is erased
    assert screen.out.getvalue().rstrip("\n").endswith("\x1b[2K")


def test_a_bar_that_is_closed_for_good_stays_closed():
    """Though a step is reported and time goes on, so that the cursor is shown when the process is ended."""
    screen = Screen(is_terminal=True)
    reporter = Reporter(screen.callback)
    reporter.record(STEP)
    screen.pass_time(2)
    assert screen.out.getvalue().rfind(HIDE_CURSOR) > screen.out.getvalue().rfind(SHOW_CURSOR)
    screen.callback.close()
    reporter.record(replace(STEP, step=2))
    reporter.end(RunEnd("failed", 7, 0.0))
    screen.pass_time(20)
    assert screen.out.getvalue().rfind(SHOW_CURSOR) > screen.out.getvalue().rfind(HIDE_CURSOR)


def test_the_bar_counts_down_between_steps_and_survives_long_paths_and_phases():
    screen = Screen(is_terminal=True, width=60)
    reporter = Reporter(screen.callback)
    reporter.record(STEP)
    reporter.stage("final", "weights of step 9 in /a/very/long/path/" + "x" * 60)
    screen.pass_time(12)
    assert "1/100  loss 2.5000  48 s left" in screen.text
    reporter.phase("evaluating")
    screen.pass_time(2)
    assert "1/100  evaluating 2 s  loss 2.5000" in screen.text
    reporter.record(replace(STEP, step=100))
    reporter.end(RunEnd("complete", 0, 0.0))
    lines = screen.text.splitlines()
    assert "/a/very/long/path/" + "x" * 60 in [line.strip() for line in lines]
    assert max(len(line) for line in lines if "xxx" not in line) <= 60
    assert lines[-1].strip().startswith("━━━━━━━━ 100/100")


def test_a_launcher_shows_rank_0_as_it_is_in_a_pipe_and_with_a_bar_on_a_terminal(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    earlier, later = ({"kind": "step", **asdict(replace(STEP, step=step, loss=float(step)))} for step in (3, 4))
    metrics.write_text(json.dumps(earlier) + "\n")
    log = "config     run: lora\n...        loading weights 12 s\nstep       4/100  loss 4.0000\n"
    pipe, stream = Screen(), io.StringIO()
    pipe.callback.on_phase("starting ranks")
    RankOutput(pipe.callback, stream, tmp_path).write(log)
    pipe.pass_time(100)
    assert stream.getvalue() == log
    assert pipe.text == ""
    screen, stream = Screen(is_terminal=True), io.StringIO()
    output = RankOutput(screen.callback, stream, tmp_path)
    output.write(log[: log.index("step")])
    screen.pass_time(5)
    assert "loading weights 17 s" in screen.text
    with metrics.open("a") as file:
        file.write(json.dumps(later) + "\n")
    output.write(log[log.index("step") :])
    output.flush()
    screen.pass_time(0.5)
    assert stream.getvalue() == ""
    assert "config     run: lora" in screen.text
    assert "━ 4/100  loss 4.0000  0:01:00 left" in screen.text
    # the bar shows what the line says, and steps of an earlier start are over
    assert "step       4/100" not in screen.text
    assert "3/100" not in screen.text
    with metrics.open("a") as file:
        records = ({"kind": "round", **asdict(ROUND)}, {**later, "step": 5})
        file.write("".join(json.dumps(record) + "\n" for record in records))
    output.flush()
    screen.pass_time(0.5)
    assert "━ 5/100  reward 0.25  0:01:00 left" in screen.text, "a policy's loss says nothing"


# the stages of a start, in order, and those that a terminal shows unless all are asked for
START = [
    ("config", "run: lora at lr 0.0002 on m, folder runs/run", True),
    ("tokens", "chats.jsonl: messages rows (messages)", False),
    ("tokens", "5,000 samples, 408,413 tokens, 30% label", True),
    ("held out", "250 samples, split by content", False),
    ("layout", "packed: without padding", False),
    ("prefixes", "not shared", False),
    ("strategy", "single: one rank", False),
    ("memory", "8,192 tokens per micro-batch, recompute none", True),
    ("plan", "2 steps of 8 samples", True),
    ("resume", "no checkpoint: start at step 0", True),
    ("model", "model: qwen3, 623,360 parameters", True),
    ("model", "attention sdpa", False),
    ("self-test", "packed = alone within 1e-07", False),
    ("optimizer", "adamw", False),
    ("compile", "off: only on CUDA", False),
    ("graphs", "off: only on CUDA", False),
]


@pytest.mark.parametrize(("is_terminal", "shows_all"), [(True, False), (True, True), (False, False)])
def test_a_terminal_shows_six_lines_of_a_start_unless_it_is_to_show_all(tmp_path, is_terminal, shows_all):
    is_brief = is_terminal and not shows_all
    screen = Screen(is_terminal=is_terminal, shows_all=shows_all)
    for name, text, _ in START:
        screen.callback.on_stage(name, text)
    shown = [line for line in screen.text.splitlines() if line.strip()]
    expected = [f"{name:<10} {text}" for name, text, always in START if always or not is_brief]
    assert shown == expected
    # the launcher of several ranks shows rank 0's log by the same rule, with lines that go on
    ranks = Screen(is_terminal=is_terminal, shows_all=shows_all)
    output = RankOutput(ranks.callback, io.StringIO(), tmp_path)
    output.write("".join(f"{name:<10} {text}\n           and more of {name}\n" for name, text, _ in START))
    told = [line.strip() for line in ranks.text.splitlines() if "and more of" in line]
    if is_terminal:
        assert told == [f"and more of {name}" for name, _, always in START if always or not is_brief]


def test_events_are_shown_however_brief_a_terminal_is():
    screen = Screen(is_terminal=True, shows_all=False)
    screen.callback.on_event("rows", {"truncated": 3})
    assert "truncated 3" in screen.text
