"""The environment of ranks, and what the kernel tells of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatout.errors import ResourceError
from flatout.io import bounded_wait
from flatout.launch import ranks
from flatout.launch.ranks import count_oom_kills, shared_environment, start_ranks
from flatout.launch.rendezvous import Rendezvous, RendezvousInfo

OTHER_NODE = RendezvousInfo(first_rank=4, world=6, host="10.0.0.1", port=5000, interface="eth1")
PARENT = {"PATH": "/bin", "RANK": "3", "PET_NNODES": "2", "TORCHELASTIC_RUN_ID": "x", "CUDA_VISIBLE_DEVICES": "0,1,2"}


def environment_for(info: RendezvousInfo, parent: dict[str, str]) -> dict[str, str]:
    return shared_environment({**parent, "FLATOUT_SECRET": "secret"}, info, 2, visible=("1", "2"), logs=Path("/logs"))


def test_the_environment_of_the_ranks():
    env = environment_for(OTHER_NODE, {**PARENT, "OMP_NUM_THREADS": "7"})
    assert (env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"], env["PATH"]) == ("1,2", "7", "/bin")
    assert not {"RANK", "PET_NNODES", "TORCHELASTIC_RUN_ID"} & env.keys()
    assert (env["FLATOUT_SECRET"], env["FLATOUT_LOGS"], env["FLATOUT_PARENT"]) == ("secret", "/logs", str(os.getpid()))
    assert PARENT["RANK"] == "3"
    assert environment_for(OTHER_NODE, PARENT)["OMP_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) // 2))


def test_each_rank_is_described_to_torch(tmp_path, monkeypatch, real_ranks):
    started: list[dict[str, str]] = []
    monkeypatch.setattr("flatout.launch.ranks.subprocess.Popen", lambda words, *, env, **_: started.append(env))
    start_ranks(["train"], OTHER_NODE, 2, {"PATH": "/bin"}, tmp_path)
    assert started[1] == {
        "PATH": "/bin",
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5000",
    }


def test_on_one_machine_collectives_stay_on_loopback():
    """Whatever interface the user's environment names for other runs."""
    other = {**PARENT, "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    info = Rendezvous().next_rendezvous(2)
    assert info.listener is not None
    with info.listener as listener:
        assert listener.getsockname() == ("127.0.0.1", info.port)
    env = environment_for(info, other)
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert environment_for(OTHER_NODE, other)["GLOO_SOCKET_IFNAME"] == "eth0"
    assert environment_for(OTHER_NODE, PARENT)["GLOO_SOCKET_IFNAME"] == "eth1"


def test_words_reach_the_ranks_as_they_are(tmp_path, real_ranks):
    """No shell and no parser of another launcher stands between."""
    words = ["train", "odd name; $(x).yaml", "model.name=a b"]
    info = Rendezvous().next_rendezvous(1)
    assert info.listener is not None
    started = start_ranks(words, info, 1, {**os.environ}, tmp_path)
    info.listener.close()
    assert started[0].wait(60) == 2
    assert "odd name; $(x).yaml" in (tmp_path / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.events": "low 0\noom 3\noom_kill 2\n"}, 2),
        # as a container sees itself
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/memory.events": "oom 3\noom_kill 4\n"}, 4),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n1:cpu:/\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
                "proc/vmstat": "oom_kill 9\n",
            },
            5,
        ),
        ({"proc/vmstat": "pgfault 3\noom_kill 7\n"}, 7),
        ({}, 0),
    ],
)
def test_kills_for_memory_are_counted(tmp_path, files, count):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert count_oom_kills(tmp_path) == count


def test_a_driver_that_does_not_answer_is_told_and_bounded(monkeypatch, capsys):
    monkeypatch.setattr(bounded_wait, "NOTICE_AFTER_S", 0.1)
    monkeypatch.setattr(ranks, "COUNT_GPUS", "import time; time.sleep(3600)")
    expected = r"timed out waiting for the GPU driver of this node, 1 s \(faults.join_s\)"
    with pytest.raises(ResourceError, match=expected):
        ranks.count_gpus(1.0, "faults.join_s")
    assert capsys.readouterr().err.count("waiting for the GPU driver of this node, at most 1 s") == 1


STARTS_A_RANK = """
import json, os, subprocess, sys, time
pids = []
for parent in (os.getpid(), 1):
    env = {**os.environ, "FLATOUT_PARENT": str(parent)}
    pids.append(subprocess.Popen([sys.executable, "-m", "flatout", "train", sys.argv[1]], env=env).pid)
print(json.dumps(pids), flush=True)
time.sleep(600)
"""


def test_a_rank_ends_with_its_launcher_from_its_first_moment(tmp_path):
    """Both while it lives, and where the launcher died before the rank could ask the kernel."""
    waits_for_ever = tmp_path / "run.yaml"
    os.mkfifo(waits_for_ever)
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_A_RANK, str(waits_for_ever)], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pids = json.loads(launcher.stdout.readline())
        until_gone(pids[1])
        assert is_there(pids[0])
        launcher.send_signal(signal.SIGKILL)
    until_gone(pids[0])


def is_there(pid: int) -> bool:
    """False also for a process that only waits for its parent's notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_gone(pid: int) -> None:
    until_s = time.monotonic() + 60
    while is_there(pid):
        assert time.monotonic() < until_s
        time.sleep(0.01)
