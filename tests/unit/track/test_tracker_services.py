"""The services themselves, as far as they run on one machine: an MLflow server, and the others' local modes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from flatout.track.record import Answer, AnswersRecord
from flatout.track.run_folder import RunFolderWriter
from tests.unit.track.service import Service

CANARY = "canary-9f2c77e1-0123456789-0123456789-01234567"
SECRETS = dict.fromkeys(("WANDB_API_KEY", "COMET_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD"), CANARY)


def needs(package: str, version: str = "0") -> Any:
    try:
        is_missing = Version(metadata.version(package)) < Version(version)
    except metadata.PackageNotFoundError:
        is_missing = True
    return pytest.mark.skipif(is_missing, reason=f"needs {package} {version if version != '0' else ''}")


def flatout(*words: object, code: int = 0, **env: str) -> str:
    """Run `flatout WORDS` in a process of its own, as services keep state in theirs; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "flatout", *map(str, words)],
        env={**os.environ, **SECRETS, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def config_file(tiny: Any, folder: Path, run: Path, num_steps: int, **track: Any) -> Path:
    from flatout.config.read import dump_config

    sections = {"batch": {"max_steps": num_steps}, "eval": {"fraction": 0.1}, "track": track}
    config = tiny.config(run, "checkpoint.allow_change=[batch.max_steps]", **sections)
    path = folder / f"{num_steps}.yaml"
    path.write_text(dump_config(config))
    return path


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """A run folder of four steps, with answers and without trackers."""
    from flatout.trainer.run import train

    folder = tmp_path_factory.mktemp("trained")
    train(tiny.config(folder / "run", batch={"max_steps": 4}, eval={"fraction": 0.1, "every_steps": 2}))
    writer = RunFolderWriter(folder / "run")
    writer.on_answers(AnswersRecord(4, (Answer("What is 2 + 2?", "It is *four*.", "Four."),), 0.1))
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def assert_no_secret(*folders: Path) -> None:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                if path.suffix == ".zip":
                    with zipfile.ZipFile(path) as archive:
                        content = b"".join(archive.read(name) for name in archive.namelist())
                assert CANARY.encode() not in content, path


def resumed(run: Path, metrics_of: Any) -> None:
    """Let the run repeat its last step and take one more."""
    last, last_eval = metrics_of(run)[-1], metrics_of(run, "eval")[-1]
    lines = ({**last, "loss": 0.25}, last_eval, {**last, "step": 5, "loss": 0.2})
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    end = json.loads((run / "end.json").read_text())
    (run / "end.json").write_text(json.dumps({**end, "ended_at": end["ended_at"] + 1}))


@needs("tensorboard")
def test_tensorboard_shows_each_step_once(run, metrics_of):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flatout("track", run, "--to", "tensorboard")
    resumed(run, metrics_of)
    flatout("track", run, "--to", "tensorboard")
    events = EventAccumulator(str(run / "trackers/tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(line["step"], pytest.approx(line["loss"])) for line in metrics_of(run)]
    assert [event.step for event in events.Scalars("eval/loss")] == [0, 2, 4]
    assert {"model", "answers", "outcome", "_hparams_/session_start_info"} <= set(events.Tags()["tensors"])
    text = events.Tensors("answers")[0].tensor_proto.string_val[0].decode()
    assert "    It is *four*." in text
    assert_no_secret(run)


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of an offline run, a log of LevelDB's format: 7 bytes of header a part, in blocks of 32 KiB."""
    content, position, data = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if (room := 32768 - position % 32768) < 7:
            position += room
            continue
        size, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        data += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield data
            data = b""


@needs("wandb")
def test_wandb_offline_keeps_everything_for_its_own_sync(run, metrics_of):
    from wandb.proto.wandb_internal_pb2 import Record

    env = {"WANDB_MODE": "offline", "WANDB_PROJECT": "papers"}
    flatout("track", run, "--to", "wandb", **env)
    resumed(run, metrics_of)
    flatout("track", run, "--to", "wandb", **env)
    files = sorted((run / "trackers/wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    found: list[tuple[int, float]] = []
    runs, config = set(), {}
    for path in files:
        for data in wandb_records(path):
            record = Record.FromString(data)
            if record.run.run_id:
                runs.add((record.run.project, record.run.run_id))
            for item in (*record.run.config.update, *record.config.update):
                config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if "train/loss" in row:
                found.append((record.history.step.num or int(row.get("_step", -1)), row["train/loss"]))
    assert len(files) == 2
    assert len(runs) == 1
    assert runs.pop()[0] == "papers"
    assert config["lora.rank"] == 4
    assert "Qwen3ForCausalLM" in config["model_text"]
    steps = [step for step, _ in found]
    assert steps == [1, 2, 3, 4, 5]
    tables = list((run / "trackers/wandb").rglob("answers*.table.json"))
    assert "It is *four*." in tables[0].read_text()
    assert_no_secret(run)


@needs("comet_ml")
def test_comet_offline_writes_archives_of_one_experiment(run, metrics_of):
    env = {"COMET_START_ONLINE": "0", "COMET_PROJECT_NAME": "papers"}
    flatout("track", run, "--to", "comet", **env)
    resumed(run, metrics_of)
    flatout("track", run, "--to", "comet", **env)
    archives = sorted((run / "trackers/comet").glob("*.zip"), key=lambda path: path.stat().st_mtime)
    steps, names, keys = [], set(), set()
    for path in archives:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read("experiment.json"))
            names.add(about["project_name"])
            keys.add(path.name.partition("-")[0])
            for line in archive.read("messages.json").splitlines():
                metric = json.loads(line)["payload"].get("metric") or {}
                if metric.get("metricName") == "train/loss":
                    steps.append(metric["step"])
    assert len(archives) == 2
    assert len(keys) == 1
    assert names == {"papers"}
    assert steps == [1, 2, 3, 4, 5]
    assert_no_secret(run)


@needs("trackio")
def test_trackio_keeps_one_local_run(run, tmp_path, metrics_of):
    env = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    flatout("track", run, "--to", "trackio", **env)
    resumed(run, metrics_of)
    flatout("track", run, "--to", "trackio", **env)
    with sqlite3.connect(tmp_path / "trackio/flatout.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    losses = [(step, json.loads(metrics)["train/loss"]) for _, step, metrics in rows if b"train/loss" in metrics]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5]
    assert any(b"It is *four*." in metrics for _, _, metrics in rows)
    assert_no_secret(run, tmp_path / "trackio")


class MlflowServer:
    """`mlflow server` with a SQLite store in a folder; it can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = f"sqlite:///{self.folder}/store.db"
        words = ["server", "--backend-store-uri", store, "--artifacts-destination", str(self.folder / "artifacts")]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", *words],
                cwd=self.folder,
                env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + 120
        while True:
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < deadline_s
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.2)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait(60)
            self._process = None


@pytest.fixture
def mlflow_server(tmp_path):
    (tmp_path / "mlflow").mkdir()
    server = MlflowServer(tmp_path / "mlflow")
    server.start()
    yield server
    server.stop()


@needs("mlflow", "2.14")
def test_a_real_mlflow_server(tiny, tmp_path, mlflow_server, metrics_of):
    server, run = mlflow_server, tmp_path / "run"
    env = {"MLFLOW_TRACKING_URI": server.address, "MLFLOW_EXPERIMENT_NAME": "papers", "MLFLOW_TRACKING_USERNAME": "ann"}
    track = {"to": ["mlflow"], "tags": ["first"], "upload_final": True}
    flatout("train", config_file(tiny, tmp_path, run, 3, **track), **env)
    flatout("track", run, **env)

    def query(text: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(server.folder / "store.db") as database:
            return database.execute(text).fetchall()

    def losses() -> list[tuple[int, float]]:
        return query("select step, value from metrics where key = 'train/loss' order by step")

    def recorded() -> list[tuple[int, float]]:
        return [(line["step"], line["loss"]) for line in metrics_of(run)]

    assert losses() == recorded()
    assert query("select name from experiments where name != 'Default'") == [("papers",)]
    assert query("select name, status from runs") == [("run", "FINISHED")]
    parameters = dict(query("select key, value from params"))
    assert parameters["lora.rank"] == "4"
    assert parameters["batch.max_steps"] == "3"
    assert "environment.versions.torch" in parameters
    tags = dict(query("select key, value from tags"))
    assert tags["first"] == "true"
    assert "Qwen3ForCausalLM" in tags["model_text"]
    uploaded = [path.name for path in (server.folder / "artifacts").rglob("*") if path.is_file()]
    assert "adapter_model.safetensors" in uploaded

    # away: training ends well, `flatout track` says so; back: the same run goes on
    server.stop()
    printed = flatout("train", config_file(tiny, tmp_path, run, 5, **track), **env)
    assert "records not sent (Connection refused" in " ".join(printed.split())
    server.start()
    flatout("track", run, **env)
    assert losses() == recorded()
    assert len(losses()) == 5
    assert query("select count(*) from runs") == [(1,)]
    parameters = dict(query("select key, value from params"))
    assert (parameters["batch.max_steps"], parameters["batch.max_steps/step-3"]) == ("3", "5")

    # what was sent and not noted is sent again, and the store has it once
    num_rows = query("select count(*) from metrics")
    cursor = json.loads((run / "trackers/mlflow.json").read_text())
    lost = {**cursor, "sent_bytes": {}, "last_steps": {}, "ended_at": None}
    (run / "trackers/mlflow.json").write_text(json.dumps(lost))
    flatout("track", run, **env)
    assert query("select count(*) from metrics") == num_rows
    assert_no_secret(run, server.folder)


@needs("mlflow", "2.14")
@pytest.mark.parametrize("mode", [500, 401, "stall"])
def test_mlflow_with_a_server_that_does_not_serve(mode, run, tmp_path):
    (tmp_path / "client").mkdir()
    service = Service(tmp_path / "client")
    service.mode = mode
    try:
        printed = flatout(
            "track", run, "--to", "mlflow", code=6, MLFLOW_TRACKING_URI=service.address,
            MLFLOW_HTTP_REQUEST_TIMEOUT="2", MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
        )  # fmt: skip
    finally:
        service.close()
    assert "error: mlflow: " in printed
    assert {500: "500", 401: "401", "stall": "timed out"}[mode] in printed
    assert "nothing is lost: run the same command again" in printed
    assert_no_secret(run)
