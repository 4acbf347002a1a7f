"""Every second of a start belongs to one stage."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatout.track.callback import MemoryCallback, Reporter
from flatout.track.record import describe_event
from flatout.track.run_log import RunLog
from flatout.track.start_up import EVENT, StartUpClock, bytecode_problem, process_launch, stages_of
from flatout.view.facts import start_rows


class Clock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_the_stages_add_up_to_the_time_since_the_launch():
    clock, heard = Clock(), MemoryCallback()
    start_up = StartUpClock(97.0, "starting the launcher", clock)
    start_up.begin("starting Python", at=98.5)
    start_up.begin("reading the settings")
    reporter = Reporter(heard, start_up=start_up)
    for seconds, phase in ((0.25, "planning"), (2.0, "self-test"), (1.0, "planning"), (4.0, "step")):
        clock.now += seconds
        reporter.phase(phase)
        reporter.phase(phase, 5, 10)
    clock.now += 0.5
    reporter.stepped()
    clock.now += 50.0
    reporter.phase("step", 2)
    reporter.stepped()
    assert heard.events == [
        (
            EVENT,
            {
                "total_s": 10.75,
                "stages": {
                    "starting the launcher": 1.5,
                    "starting Python": 1.5,
                    "reading the settings": 0.25,
                    "planning": 6.0,
                    "self-test": 1.0,
                    "step": 0.5,
                },
            },
        )
    ]
    line = describe_event(*heard.events[0])
    assert line.startswith("10.8 s from launch to the end of the first step: planning 6.0, starting the launcher 1.5")


def test_a_clock_that_is_set_back_makes_no_stage_negative():
    clock = Clock()
    start_up = StartUpClock(clock=clock)
    clock.now = 50.0
    start_up.begin("planning")
    clock.now = 51.0
    assert start_up.finish() == {"total_s": 1.0, "stages": {"starting": 0.0, "planning": 1.0}}


def test_the_launch_of_this_process_is_before_now():
    assert time.time() - 86_400 < process_launch() <= time.time()


def test_a_damaged_event_has_no_stages():
    assert stages_of({"stages": "gone"}) == {}
    assert stages_of({"stages": {"planning": "long", "step": 2}}) == {"step": 2.0}
    assert describe_event(EVENT, {}) == "0.0 s from launch to the end of the first step: "


def test_a_report_lists_the_stages_of_the_last_start_and_their_sum():
    earlier = {"kind": EVENT, "stages": {"planning": 9.0}}
    last = {"kind": EVENT, "stages": {"planning": 1.5, "step": 2.0}}
    rows = start_rows(RunLog(Path("run"), events=[earlier, {"kind": "saved"}, last]))
    assert rows == [("planning", "1.50"), ("step", "2.00"), ("launch to the end of the first step", "3.50")]
    assert start_rows(RunLog(Path("run"))) == []


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])
def test_packages_without_bytecode_are_named(tmp_path, keeps):
    code = (
        "import json; from flatout.track.start_up import bytecode_problem; print(bytecode_problem(['json', 'flatout']))"
    )
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    if not keeps:
        env["PYTHONDONTWRITEBYTECODE"] = "1"
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    if keeps:
        assert told == "None\n"
    else:
        assert told.startswith("Python compiles json, flatout at every start, as it keeps no bytecode: unset PYTHOND")


def test_a_cache_that_may_not_be_read_ends_no_run(monkeypatch):
    def refuse(path: object, **_: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert (bytecode_problem(["pytest"]) or "").startswith("Python compiles pytest at every start")
