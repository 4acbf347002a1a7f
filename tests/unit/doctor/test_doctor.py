"""What `flatout doctor` finds: GPUs that are held, disks that are short, folders that are not shared."""

import json
import os
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
import torch
from spawned_ranks import start_warm_ranks
from warm_process import WarmProcess

from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.doctor.run import (
    GPU_FIELDS,
    PROCESS_FIELDS,
    check_machine,
    check_space,
    check_torch,
    checkpoint_bytes,
    compare_nodes,
    examine,
    judge_gpus,
    judge_links,
    parse_rows,
)
from flatout.io.durable_io import Disk
from flatout.io.file_lock import RunLock
from flatout.parallel.rank import Rank
from flatout.trainer.run import train
from tests.usual import usual

GPUS = "0, GPU-a, NVIDIA H100, 580.1, 81559, 4\n1, GPU-b, NVIDIA H100, 580.1, 81559, 40779\n"
PROCESSES = f"GPU-b, {os.getpid()}, 40000, /usr/bin/python\nGPU-b, 4000000, [N/A], trainer\n"


def test_a_held_gpu_is_told_with_who_holds_it():
    gpus = parse_rows(GPUS, GPU_FIELDS)
    free, held = judge_gpus(gpus, parse_rows(PROCESSES, PROCESS_FIELDS))
    assert (free.what, free.status) == ("GPU 0", "ok")
    assert (held.what, held.status) == ("GPU 1", "warn")
    assert "39.8 of 79.6 GiB free" in held.got
    assert f"pid {os.getpid()} (" in held.got
    assert "python) 39.1 GiB" in held.got
    assert "pid 4000000 (another user, trainer)" in held.got
    # in a container the processes of others cannot be seen, but their memory can
    (unseen,) = judge_gpus(gpus[1:], [])
    assert (unseen.status, "cannot see" in unseen.got) == ("warn", True)


def test_rows_that_nvidia_smi_does_not_fill_are_left_out():
    rows = parse_rows("No devices were found\n0, GPU-a, x, 1, [N/A], 5\n", GPU_FIELDS)
    assert list(judge_gpus(rows, [])) == []


def test_links_through_the_host_and_slow_ones_are_warned_of():
    fast = {(0, 1): 300e9, (1, 0): 310e9}
    assert judge_links(2, 0, fast).status == "ok"
    assert judge_links(2, 2, fast).status == "warn"
    slow = judge_links(2, 0, fast | {(0, 1): 3e9})
    assert (slow.status, "slowest 0 to 1" in slow.got) == ("warn", True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_asked_for_and_not_there_fails():
    assert [finding.status for finding in check_torch("cuda")] == ["ok", "fail"]
    assert [finding.status for finding in check_torch("auto")] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("compiler", "header", "lacks"), [("gcc", True, None), (None, True, "no C compiler"), ("gcc", False, "Python.h")]
)
def test_what_triton_compiles_with_is_looked_for(monkeypatch, tmp_path, compiler, header, lacks):
    """Debian's Python comes without its header, which the package python3-dev has."""
    known = metadata.version
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(metadata, "version", lambda name: "3.7.1" if name == "triton" else known(name))
    monkeypatch.setattr(shutil, "which", lambda name: compiler if name == "gcc" else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    if header:
        (tmp_path / "Python.h").touch()
    [found] = [finding for finding in check_machine("cpu") if finding.what == "triton"]
    assert found.status == ("warn" if lacks else "ok")
    assert (lacks or "compiler gcc") in found.got
    assert not lacks or "python3-dev" in found.do


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("optimizer", usual(["adamw", "sgd"], ["adamw"]))
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(tiny, tmp_path, method, optimizer):
    config = tiny.config(tmp_path / "run", method=method, optim={"name": optimizer}, batch={"max_steps": 1})
    train(config)
    files = (config.folder / "checkpoints" / "step-1").glob("*.safetensors")
    written = sum(path.stat().st_size for path in files)
    # the rest are names and offsets, which weigh as much as a tiny model's tensors do
    assert checkpoint_bytes(config) == pytest.approx(written, rel=0.25)


class SmallDisk(Disk):
    def __init__(self, free_bytes: int) -> None:
        self.free = free_bytes

    def free_bytes(self, path: Path) -> int:
        return self.free


def test_room_for_two_checkpoints_is_the_least(tiny, tmp_path):
    config = tiny.config(tmp_path, checkpoint={"keep": 3})
    one = checkpoint_bytes(config)
    statuses = [check_space(config, SmallDisk(n * one)).status for n in (1, 2, 4, 5)]
    assert statuses == ["fail", "warn", "warn", "ok"]


def test_a_healthy_run_has_no_failed_line_and_leaves_nothing_behind(tiny, tmp_path):
    config = tiny.config(tmp_path / "run")
    findings = {finding.what: finding for finding in examine(config, Rank())}
    assert {"torch", "packages", "model", "run folder", "disk space", "rehearsal"} <= set(findings)
    assert not [finding for finding in findings.values() if finding.status == "fail"]
    assert not (tmp_path / "run").exists()


def test_a_folder_that_another_run_holds_fails_with_exit_code_6(tiny, tmp_path, capsys):
    config = tiny.config(tmp_path / "run")
    (tmp_path / "run.yaml").write_text(dump_config(config))
    with RunLock(config.folder):
        assert main(["doctor", str(tmp_path / "run.yaml"), "--json"]) == 6
    told = capsys.readouterr()
    with RunLock(config.folder):
        assert main(["doctor", str(tmp_path / "run.yaml")]) == 6
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= max(80, 19 + len(str(config.folder)))
    (failed,) = [finding for finding in json.loads(told.out) if finding["status"] == "fail"]
    assert f"locked by pid {os.getpid()}" in failed["got"]
    assert told.err.startswith("error: doctor: 1 of ")


def test_a_model_that_is_not_there_is_a_line_not_a_traceback(tiny, tmp_path):
    config = tiny.config(tmp_path / "run", model={"name": str(tmp_path / "nowhere")})
    failed = {finding.what for finding in examine(config, Rank()) if finding.status == "fail"}
    assert "model" in failed


def test_other_versions_on_a_node_are_named():
    nodes = [{"host": "a", "versions": {"torch": "2.13"}}, {"host": "b", "versions": {"torch": "2.11"}}]
    different = compare_nodes(nodes)
    assert (different.status, different.got) == ("fail", "torch 2.13 on a, 2.11 on b")
    assert compare_nodes([nodes[0], nodes[0]]).status == "ok"


@pytest.mark.parametrize("shared", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_ranks_that_see_different_run_folders_are_found(tiny, tmp_path, shared):
    config = tiny.config(Path("run"))
    (tmp_path / "run.yaml").write_text(dump_config(config))
    places = [tmp_path / ("node" if shared else f"node-{index}") for index in range(2)]
    for place in places:
        place.mkdir(exist_ok=True)
    # each in the folder of its node
    words = ["-m", "flatout", "doctor", str(tmp_path / "run.yaml"), "--json"]

    def start(words, env, log):
        return WarmProcess(words, env, log, places[int(env["RANK"])])

    processes = start_warm_ranks(2, lambda rank: words, tmp_path / "logs", start)
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0 if shared else 6, 0], outputs
    assert "[" not in outputs[1]
    found, _ = json.JSONDecoder().raw_decode(outputs[0][outputs[0].index("[") :])
    statuses = [finding["status"] for finding in found if finding["what"] == "shared folder"]
    assert statuses == ["ok" if shared else "fail"]
    assert not list(tmp_path.glob("node*/run"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_gpus_every_check_answers():
    findings = {finding.what: finding for finding in examine(None, Rank())}
    assert {"CUDA", "NCCL", "triton"} <= set(findings)
    assert findings["CUDA"].status == "ok"
    assert "driver" in findings
    if torch.cuda.device_count() > 1:
        assert "GB/s" in findings["links"].got
