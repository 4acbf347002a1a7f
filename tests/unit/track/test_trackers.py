"""Trackers beside a run: what arrives, what waits while a service is away, and what never leaves this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import torch  # noqa: F401  (its import is no part of a test's time)

from flatout.cli.main import main
from flatout.config.read import dump_config, make_config
from flatout.config.track import TrackerName
from flatout.errors import DataError, ProblemsError, ResourceError, UsageError
from flatout.io.durable_io import DurableIO
from flatout.io.redact import redacted, secrets_of
from flatout.track import forward
from flatout.track.forward import read_cursor
from flatout.track.record import StepRecord
from flatout.track.tracker import Tracker
from flatout.track.trackers import TRACKERS, require_installed
from tests.unit.track.service import Service
from tests.usual import usual

CANARY = "canary-9f2c77e1"


@pytest.fixture
def service(tmp_path, monkeypatch):
    client = tmp_path / "client"
    client.mkdir()
    found = Service(client)
    monkeypatch.syspath_prepend(str(client))
    monkeypatch.setenv("PYTHONPATH", f"{client}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SERVICE", found.address)
    monkeypatch.setenv("SERVICE_TOKEN", CANARY)
    # in this process `flatout track` imports the client, too
    for name in ("trackio", "flatout.track.trackers.trackio"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield found
    found.close()
    for name in ("trackio", "flatout.track.trackers.trackio"):
        sys.modules.pop(name, None)


def until(is_so: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 400  # the process that sends gives way to all others
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def losses(run: Path, metrics_of: Any) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics_of(run)]


def train(tiny: Any, run: Path, num_steps: int, **track: Any) -> None:
    from flatout.trainer.run import train

    sections = {"batch": {"max_steps": num_steps}, "eval": {"fraction": 0.1}, "track": {"to": ["trackio"], **track}}
    train(tiny.config(run, "checkpoint.allow_change=[batch.max_steps]", **sections))


def written(tiny: Any, folder: Path, run: Path) -> Path:
    """A configuration file of a run of three steps."""
    config = tiny.config(run, track=["trackio"], batch={"max_steps": 3}, eval={"fraction": 0.1})
    (folder / "run.yaml").write_text(dump_config(config))
    return folder / "run.yaml"


def forwarders(run: Path) -> list[int]:
    """The processes that send this run's records."""
    words = f"flatout.track.forward\0{run}\0".encode()
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if words in _bytes(path)]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_run_and_its_resumption_are_one_run_at_the_service(tiny, tmp_path, service, metrics_of, monkeypatch):
    monkeypatch.setattr(forward, "WAIT_S", 100.0)
    run = tmp_path / "run"
    train(tiny, run, 2, tags=["first"], project="papers", upload_final=True)
    (start,) = service.of_kind("init")
    assert start["project"] == "papers"
    assert start["config"]["tags"] == ["first"]
    assert start["config"]["lora.rank"] == 4
    assert start["config"]["environment.num_trained_parameters"] > 0
    assert "Qwen3ForCausalLM" in start["config"]["model_text"]
    assert service.values("train/loss") == losses(run, metrics_of)
    assert [step for step, _ in service.values("eval/loss")] == [0, 2]
    assert service.values("outcome") == [(2, "complete")]
    assert "adapter_model.safetensors" in service.of_kind("artifact")[0]["files"]

    train(tiny, run, 4)
    assert {one["run"] for one in service.received} == {start["run"]}
    assert service.values("train/loss") == losses(run, metrics_of)
    assert len(service.values("train/loss")) == 4

    # a kill after a step was sent and before it was noted, or a step that is trained again, adds no second point
    cursor = json.loads((run / "trackers/trackio.json").read_text())
    (run / "trackers/trackio.json").write_text(json.dumps({**cursor, "sent_bytes": {}, "ended_at": None}))
    assert main(["track", str(run)]) == 0
    assert len(service.values("train/loss")) == 4

    # the client prints its token: no file of the run holds it, and others cannot read what the trackers keep
    assert CANARY not in json.dumps(service.received)
    assert "sending log with ***" in (run / "trackers/forward.log").read_text()
    assert not [path for path in run.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    kept = [run / "trackers", *(run / "trackers").rglob("*")]
    assert not [path for path in kept if stat.S_IMODE(path.stat().st_mode) & 0o077]


def test_training_ends_while_the_service_stalls_and_what_waits_is_sent_later(
    tiny, tmp_path, service, metrics_of, monkeypatch, capsys
):
    monkeypatch.setattr(forward, "WAIT_S", 2.5)
    service.mode, run = "stall", tmp_path / "run"
    train(tiny, run, 3, upload_final=True)  # sending then goes on for half an hour, which no machine needs
    until(lambda: service.num_stalled)
    assert service.received == []
    assert len(metrics_of(run)) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "sending the last records to trackio" in printed
    goes_on = rf"sending goes on for half an hour; then `flatout track {run}` sends the rest"
    assert re.search(rf"trackio: \d+ records not sent track {goes_on}", printed)
    # the process is still there, and goes on when the service does
    service.take()
    until(lambda: read_cursor(run, "trackio").ended_at)
    assert service.values("train/loss") == losses(run, metrics_of)


def test_a_service_that_refuses_costs_nothing_and_gets_everything_later(
    tiny, tmp_path, service, metrics_of, monkeypatch, capsys
):
    monkeypatch.setattr(forward, "WAIT_S", 2.5)
    monkeypatch.setattr(forward, "CHECK_EVERY_S", 0.0)
    service.mode, run = 500, tmp_path / "run"
    # a folder of the package's name is no package
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    (tmp_path / "no_such_package").mkdir()
    assert main(["train", str(written(tiny, tmp_path, run))]) == 0
    assert "records not sent (HTTP Error 500" in " ".join(capsys.readouterr().out.split())
    until(lambda: not [pid for pid in forwarders(run) if os.kill(pid, signal.SIGKILL)])
    for mode, why in ((500, "HTTP Error 500"), (401, "HTTP Error 401")):
        service.mode = mode
        assert main(["track", str(run)]) == 6
        assert f"error: trackio: {why}" in capsys.readouterr().err
    monkeypatch.setenv("SERVICE", "http://127.0.0.1:1")
    assert main(["track", str(run)]) == 6
    assert "error: trackio: Connection refused" in capsys.readouterr().err
    monkeypatch.setenv("SERVICE", service.address)
    service.mode = "take"
    assert main(["track", str(run)]) == 0
    assert re.search(r"trackio     has everything; \d+ records sent now", capsys.readouterr().out)
    assert service.values("train/loss") == losses(run, metrics_of)
    assert read_cursor(run, "trackio").trouble is None

    assert main(["track", str(run), "--to", "neptune"]) == 2
    start = json.loads((run / "start.json").read_text())
    start["settings"]["track.to"] = ["neptune"]
    (run / "start.json").write_text(json.dumps(start))
    assert main(["track", str(run)]) == 3
    assert "start.json: track: " in capsys.readouterr().err


def test_when_training_is_killed_the_rest_is_sent_and_no_process_stays(tiny, tmp_path, service, metrics_of):
    run = tmp_path / "run"
    train(tiny, run, 2)
    until(lambda: not forwarders(run))
    shutil.rmtree(run / "trackers")
    (run / "end.json").unlink()
    service.received.clear()
    # a process in training's place
    code = f"""if True:
        import sys, time
        from pathlib import Path
        from flatout.track.run_log import read_start
        from flatout.track.forward import TrackerProcess
        TrackerProcess(Path({str(run)!r}), ["trackio"], print).on_start(read_start(Path({str(run)!r})))
        time.sleep(1000)"""
    training = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: len(service.values("train/loss")) == 2)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**metrics_of(run)[-1], "step": 3}) + "\n")
    finally:
        training.kill()
        training.wait(60)
    last_at = (run / "metrics.jsonl").stat().st_mtime
    until(lambda: not forwarders(run))
    # the service learns when it was killed, not when it started
    assert read_cursor(run, "trackio").ended_at == pytest.approx(last_at)
    assert [step for step, _ in service.values("train/loss")] == [1, 2, 3]
    assert service.values("outcome") == [(3, "stopped")]
    assert main(["track", str(run)]) == 0
    assert len(service.of_kind("init")) == 1


@pytest.mark.parametrize("mode", usual(["take", 500], ["take"]))
def test_a_client_that_hangs_at_exit_does_not_keep_the_command(tiny, tmp_path, service, mode):
    train(tiny, tmp_path / "run", 2, to=[])
    service.mode = mode
    with (tmp_path / "client" / "trackio.py").open("a") as client:
        client.write("\nimport atexit, threading, time\natexit.register(time.sleep, 1000)\n")
        client.write("threading.Thread(target=time.sleep, args=[1000]).start()\n")
    words = ["track", str(tmp_path / "run"), "--to", "trackio"]
    done = subprocess.run([sys.executable, "-m", "flatout", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == (0 if mode == "take" else 6), done.stderr
    assert ("has everything" in done.stdout) == (mode == "take")
    assert ("nothing is lost" in done.stderr) == (mode == 500)


def test_a_folder_that_cannot_be_sent_is_refused(tmp_path, capsys):
    assert main(["track", str(tmp_path)]) == 3
    assert "has no start.json" in capsys.readouterr().err
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers/mlflow.json").write_text('{"run_id": 7}')
    with pytest.raises(DataError, match="remove it to send everything as a new run"):
        read_cursor(tmp_path, "mlflow")


def test_settings_of_trackers():
    def settings(*overrides: str, **sections: Any) -> Any:
        return make_config({"model": {"name": "m"}, **sections}, overrides).track

    assert (
        settings(track=["mlflow", "wandb"])
        == settings("track=[mlflow,wandb]")
        == settings(track={"to": ["mlflow", "wandb"]})
    )
    assert settings("track=mlflow").to == ["mlflow"]
    # an override of one setting goes on top of the short form
    for short in (["mlflow"], "mlflow"):
        assert settings("track.tags=[first]", track=short) == settings(track={"to": ["mlflow"], "tags": ["first"]})
        assert settings("track.to=[wandb]", track=short).to == ["wandb"]
    assert settings("track=mlflow", "track.project=x").project == "x"
    for wrong, why in (
        ({"to": ["mlflow", "mlflow"]}, "track: a tracker is listed twice"),
        ({"project": "x"}, "track: project has no effect with no tracker"),
        ({"to": ["tensorboard"], "upload_final": True}, "track: upload_final has no effect with only tensorboard"),
        ({"to": ["mlflow"], "tags": ["a b"]}, "track.tags: use letters, digits, dots, dashes and underscores"),
        (["neptune"], "track.to: expected list of tensorboard"),
    ):
        with pytest.raises(ProblemsError, match=why):
            settings(track=wrong)


def test_every_tracker_has_a_name_a_row_and_an_extra():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = {name: requirements[0] for name, requirements in project["optional-dependencies"].items()}
    assert set(get_args(TrackerName)) == set(TRACKERS)
    assert TRACKERS.keys() <= extras.keys()
    assert not any("mlflow" in text for text in (*project["dependencies"], *project["optional-dependencies"]["dev"]))


def test_a_missing_package_is_told_before_anything_is_loaded(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TRACKERS, "trackio", ("no_such_package", TRACKERS["trackio"][1]))
    with pytest.raises(UsageError, match=r"no_such_package, which is not installed; pip install -e '.*\[trackio\]'"):
        require_installed(["trackio"])
    # a folder of the package's name is no package
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    (tmp_path / "no_such_package").mkdir()
    assert main(["train", str(written(tiny, tmp_path, tmp_path / "run"))]) == 2
    assert not (tmp_path / "run").exists()


def test_secrets_are_found_by_the_names_of_variables():
    env = {
        "HF_TOKEN": "hf_abcdef",
        "WANDB_API_KEY": "0123456",
        "KEYBOARD": "keyboard",
        "AWS_SECRET_ACCESS_KEY": "sixsix",
    }
    secrets = secrets_of({**env, "X_TOKEN": "no"})
    assert sorted(secrets) == ["0123456", "hf_abcdef", "sixsix"]
    assert redacted({"a": ["x hf_abcdef y", "keyboard"]}, secrets) == {"a": ["x *** y", "keyboard"]}


class Counting(Tracker):
    """A service that takes everything, and does not replace a step that it gets twice."""

    steps: ClassVar[list[int]] = []
    replaces_steps = True

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record.step)

    def flush(self) -> bool:
        return True


def test_what_a_full_disk_could_not_note_is_not_sent_again(tiny, tmp_path, monkeypatch):
    from flatout.trainer.run import train

    run = tmp_path / "run"
    train(tiny.config(run, batch={"max_steps": 3}))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])
    write_json, is_full = DurableIO.write_json, False

    def write_or_refuse(self, path, value):
        if is_full:
            raise ResourceError("no space left on device")
        write_json(self, path, value)

    monkeypatch.setattr(DurableIO, "write_json", write_or_refuse)
    monkeypatch.setitem(sys.modules, "counting", sys.modules[__name__])
    monkeypatch.setattr(forward, "TRACKERS", {"mlflow": ("mlflow", "counting.Counting")})
    monkeypatch.setattr(forward, "FOLLOW_S", 0.01)
    (run / "trackers").mkdir()
    sending = forward.Delivery(forward.TrackedRun.read(run), "mlflow")
    sending.start()
    until(lambda: Counting.steps == [1] or sending.trouble)
    assert sending.trouble is None
    is_full = True
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines[1])
    until(lambda: sending.trouble)
    is_full = False
    until(lambda: not sending.trouble)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines[2])
    sending.finish(forward.TrackedRun.read(run).end())
    until(lambda: sending.is_complete)
    assert Counting.steps == [1, 2, 3]
