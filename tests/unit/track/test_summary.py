import re
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.errors import CheckpointError
from flatout.track.record import EvalFigures, EvalRecord, HeldOutRecord, RoundRecord, RunEnd, StepRecord
from flatout.track.run_log import RunLog
from flatout.track.summary import next_commands, short_count, short_time, summarize, summary_lines

STEP = StepRecord(
    step=1, num_steps=100, epoch=0.1, loss=2.5, token_accuracy=0.25, lr=1e-4, grad_norm=0.5, num_samples=4,
    num_tokens=100, num_label_tokens=60, num_micro_batches=2, tokens_per_s=1000.0, label_tokens_per_s=600.0,
    step_s=0.1, data_wait_s=0.01, flops_per_s=4e14, mfu=0.4, padding_avoided=0.4, balance=1.0,
    peak_memory_bytes=2**30, elapsed_s=0.1, num_ranks=2, rank_busy_s=(0.05, 0.09), processed_tokens_per_s=1250.0,
    forward_s=0.02, backward_s=0.05, checkpoint_wait_s=0.001, num_recorded=10,
)  # fmt: skip


def evaluation(step: int, loss: float, *, best: bool) -> EvalRecord:
    figures = {"chats": EvalFigures(loss, 0.5, 60), "code": EvalFigures(2 * loss, 0.5, 60)}
    return EvalRecord(step, loss, 0.5, 120, best, 2.0, by_data=figures)


def log(folder: Path = Path("runs/x")) -> RunLog:
    """100 steps in ten records; the first ones after step 0 and after a resume at step 50 are slow."""
    steps = [replace(STEP, step=10 * n, loss=3.0 - 0.1 * n, elapsed_s=float(n)) for n in range(1, 11)]
    steps[0] = replace(steps[0], tokens_per_s=10.0, mfu=0.004)
    steps[5] = replace(steps[5], tokens_per_s=10.0, mfu=0.004, peak_memory_bytes=3 << 30)
    evals = [evaluation(0, 3.0, best=True), evaluation(50, 2.0, best=True), evaluation(100, 2.2, best=False)]
    events = [
        {"kind": "resumed", "step": 50},
        {"kind": "skipped", "step": 3},
        {"kind": "saved", "staged_s": 0.5},
        {"kind": "compiled", "seconds": 7.0},
        {"kind": "saved", "staged_s": "damaged"},
    ]
    return RunLog(folder, end=RunEnd("complete", 0, 1.0), steps=steps, evals=evals, events=events)


def test_a_summary_adds_up_what_the_records_stand_for():
    found = summarize(log())
    assert (found.num_steps, found.num_planned_steps, found.outcome, found.name) == (100, 100, "complete", "x")
    assert found.trained is not None
    assert (found.trained.first, found.trained.last) == pytest.approx((2.9, 2.0))
    assert found.num_tokens == 8 * 1000 + 2 * 10
    assert found.num_label_tokens == 6000
    assert found.peak_memory_bytes == 3 << 30
    # records with steps right after a start would halve these
    assert (found.tokens_per_s, found.mfu, found.num_warm_up_records) == (pytest.approx(1000), pytest.approx(0.4), 2)
    evaluations = found.evaluation
    assert evaluations is not None
    assert (evaluations.first, evaluations.last, evaluations.best, evaluations.best_step) == (3.0, 2.2, 2.0, 50)
    assert found.evaluation_by_data["code"].best == 4.0
    assert found.events == {"resumed": 1, "skipped": 1}
    assert found.lost.imbalance_s == pytest.approx(0.02 * 100)
    assert found.lost.data_wait_s == pytest.approx(1.0)
    assert found.lost.checkpoint_s == pytest.approx(0.1 + 0.5)
    assert found.lost.compile_s == 7.0
    assert found.lost.eval_s == 6.0
    # a fifth of the processed tokens is filler, in eight of ten records
    assert found.lost.padding_s == pytest.approx((8 * 0.2 + 2 * 0.992) * 0.07 * 10)
    assert found.warnings == (
        "the evaluation got worse after step 50, 2.0000 to 2.2000: train fewer steps, or use best/",
    )


def test_what_went_wrong_is_a_warning():
    bad = log()
    bad.steps = [replace(step, loss=1.0 + 0.1 * n) for n, step in enumerate(bad.steps)]
    bad.evals = [evaluation(0, 1.0, best=True), evaluation(50, 1.5, best=False)]
    bad.events = [{"kind": "straggler", "rank": 1}]
    bad.num_bad_lines = 2
    text = "\n".join(summarize(bad).warnings)
    assert "no evaluation was better than the first, 1.0000" in text
    assert "the loss of the last 3 records is not lower than of the first 3" in text
    assert "slow for many steps: rank 1;" in text
    assert "2 lines of this run's files could not be read" in text


@pytest.mark.parametrize(("idle", "cut"), [(4, 0.5), (5, 0.9)])
def test_rounds_that_teach_nothing_and_answers_that_are_cut_are_warnings(idle, cut):
    found = log()
    found.evals, found.events = [], [{"kind": "skipped", "why": "all rewards of each group are equal"}]
    found.steps = [replace(step, loss=0.0 if n >= idle else None) for n, step in enumerate(found.steps)]
    found.rounds = [RoundRecord(0, 1, 0.25, 64, 0, 48, 300.0, cut, 0.25, 20.0, 5.0, 0.0, 900.0)]
    found.held_out = [HeldOutRecord(step, 0.5, 0, 3.0) for step in (0, 100)]
    lines = summary_lines(summarize(found), next_commands(found))
    text = " ".join(" ".join(lines).split())
    many = idle >= 5
    assert ("50 of 100 steps changed nothing: all rewards of each group are equal" in text) is many
    assert ("90% of the answers of round 1 were cut at rollout.max_new_tokens" in text) is many
    assert "held_out 0.5 first, 0.5 last, no change" in text
    assert "eval 6 s, sample 20 s, score 5 s" in text
    assert "next flatout rollouts runs/x --round 1" in text


def test_a_loss_that_falls_after_the_best_by_another_metric_is_no_warning():
    found = log()
    found.evals = [evaluation(0, 3.0, best=True), evaluation(50, 2.0, best=True), evaluation(100, 1.5, best=False)]
    assert summarize(found).warnings == ()


def test_the_lines_fit_a_screen_and_an_empty_run_has_a_summary_too():
    found = log()
    found.num_bad_lines = 1
    lines = summary_lines(summarize(found), next_commands(found))
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 80
    assert lines[0] == "summary    complete, 100 of 100 steps in 10 s of training"
    assert "eval       3.0000 first, 2.2000 last, 2.0000 best, after step 50" in lines
    assert any(line.startswith("time lost  padding") for line in lines)
    assert not any(line.startswith("saved") for line in lines)
    empty = RunLog(Path("runs/y"))
    assert summary_lines(summarize(empty), [])[0] == "summary    not ended, 0 of 0 steps"


def test_an_incomplete_run_says_where_the_next_start_continues():
    stopped = log()
    for events, line in (
        ([{"kind": "saved", "step": 50}], "saved      at step 50, where the same command continues"),
        ([], "saved      never: the same command begins again at step 0"),
    ):
        stopped.events, stopped.end = events, RunEnd("stopped", 75, 1.0, "stop requested")
        assert line in summary_lines(summarize(stopped), [], is_short=True)
        # the same command would end in the same way
        stopped.end = RunEnd("failed", CheckpointError.exit_code, 1.0, "rewards.py differs")
        lines = summary_lines(summarize(stopped), [], is_short=True)
        assert re.split("[,:]", line)[0] in lines


def test_the_next_commands_follow_from_the_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = log(Path("runs/my x"))
    assert [command.split()[1] for command in next_commands(done)] == ["chat", "report", "merge"]
    assert next_commands(done)[0] == "flatout chat 'runs/my x'"
    done.end = RunEnd("stopped", 75, 1.0, "stop requested")
    # a run that ended before it wrote its settings has none to train
    assert next_commands(done)[0] == "flatout report 'runs/my x'"
    done.folder.mkdir(parents=True)
    (done.folder / "config.yaml").touch()
    assert next_commands(done)[0] == "flatout train 'runs/my x/config.yaml'"
    done.end = RunEnd("failed", CheckpointError.exit_code, 1.0, "rewards.py differs")
    assert [command.split()[1] for command in next_commands(done)] == ["report", "watch"]
    done.end = None
    assert next_commands(done)[0] == "flatout watch 'runs/my x'"


def test_numbers_are_short():
    assert [short_count(number) for number in (7, 999, 12_345, 1_234_567, 9.9e11)] == [
        "7", "999", "12.3k", "1.23M", "990G",
    ]  # fmt: skip
    assert [short_time(seconds) for seconds in (0, 0.25, 42, 3723)] == ["0 s", "0.25 s", "42 s", "1:02:03"]
