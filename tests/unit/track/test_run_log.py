"""A run folder is read while it is written, after a kill, and when something else lies in it."""

import json
import re
from dataclasses import asdict, replace

import pytest
from test_track import END, EVAL, STEP

from flatout.config.folders import run_identity
from flatout.errors import DataError
from flatout.track.callback import Reporter
from flatout.track.record import Answer, AnswersRecord, EvalFigures
from flatout.track.run_folder import RunFolderWriter
from flatout.track.run_log import LineFollower, RunFollower, read_run


def test_records_come_back_as_they_were_written(tmp_path):
    evaluated = replace(EVAL, by_data={"chats": EvalFigures(2.0, 0.5, 60)})
    answers = AnswersRecord(1, (Answer("what?", "that", "this"), Answer("who?", "me")), 0.5)
    step = replace(STEP, rank_busy_s=(0.1, 0.2))
    reporter = Reporter(RunFolderWriter(tmp_path))
    follower = RunFollower(tmp_path)
    assert not follower.poll()
    for record in (step, evaluated, answers):
        reporter.record(record)
    reporter.saved(1, tmp_path / "checkpoints/step-1", {"best": True})
    assert follower.poll()
    log = follower.log
    assert (log.steps, log.evals, log.answers) == ([step], [evaluated], [answers])
    assert [event["kind"] for event in log.events] == ["saved"]
    assert log.end is None
    reporter.end(END)
    assert follower.poll()
    assert log.end == END
    assert not follower.poll()
    assert log.num_bad_lines == 0


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path):
    reporter = Reporter(RunFolderWriter(tmp_path))
    for step in (1, 2, 3, 2):
        reporter.record(replace(STEP, step=step, loss=step / 2 if step == 3 else 1.0))
    assert [(record.step, record.loss) for record in read_run(tmp_path).steps] == [(1, 1.0), (2, 1.0)]


def test_a_line_is_read_once_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = json.dumps({"kind": "step", **asdict(STEP)}).encode()
    path.write_bytes(line + b"\n" + line[:20])
    follower = LineFollower(path)
    assert len(list(follower.new_lines())) == 1
    assert follower.offset == len(line) + 1
    with path.open("ab") as file:
        file.write(line[20:] + b"\n[1]\nnot json\n")
    assert len(list(follower.new_lines())) == 1
    assert follower.num_bad == 2
    assert list(LineFollower(path, follower.offset).new_lines()) == []


def test_what_flatout_did_not_write_is_counted_or_named(tmp_path):
    with pytest.raises(DataError, match=r"is not a run folder: it has no run\.json of flatout"):
        read_run(tmp_path)
    run_identity(tmp_path)
    lines = [{"kind": "step", "loss": 1}, {"kind": "other"}, {"loss": 2}, {"kind": "eval", "step": "x"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(tmp_path).num_bad_lines == 4
    for text, why in (("[]", "should be an object"), ("{", "JSON"), ("{}", "name: Field required")):
        (tmp_path / "start.json").write_text(text)
        log = read_run(tmp_path)
        assert re.search(f"start.json.*{why}.*; repair the file", log.problems["start.json"])
        assert (log.start, log.state, log.num_bad_lines) == (None, "damaged", 4)
