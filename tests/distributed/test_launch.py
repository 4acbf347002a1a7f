"""`flatout train` with `gpus`: real launchers, real ranks."""

import ipaddress
import json
import os
import signal
import socket
import struct
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from launching import DEADLINE_S, launch, num_steps_told, settings, wait_for_steps

import flatout
from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.launch.attempt import RankReport


def test_two_jobs_at_once_one_right_one_wrong(tiny, tmp_path, metrics_of):
    """The right one equals one process; the wrong one exits with its own code, at once, and shows why."""
    from flatout.trainer.run import train

    rows = tmp_path / "bad.jsonl"
    rows.write_text('{"messages": [{"role": "user"}]}\n')
    data = {"name": "bad", "root": str(tmp_path / "data"), "sources": [{"path": str(rows)}]}
    # no rank imports a file of the working folder that has a module's name; the `flatout` command does not either
    work = tmp_path / "work"
    work.mkdir()
    (work / "random.py").write_text("raise RuntimeError('a file of the working folder')")
    env = {**os.environ, "PYTHONPATH": str(Path(flatout.__file__).parents[1])}
    config = tiny.config(tmp_path / "right", **settings(tiny))
    right = launch(config, tmp_path / "a", ("-P",), in_words=True, cwd=work, env=env)
    wrong = launch(tiny.config(tmp_path / "wrong", **settings(tiny, data=data)), tmp_path / "b")
    train(tiny.config(tmp_path / "alone", **settings(tiny, gpus=None)))
    output = wrong.communicate(timeout=DEADLINE_S)[0]
    assert wrong.returncode == 3, output
    assert "bad.jsonl" in output
    assert [path.name for path in sorted((tmp_path / "wrong" / "logs").iterdir())] == [".lock", "attempt-0", "latest"]
    output = right.communicate(timeout=DEADLINE_S)[0]
    assert right.returncode == 0, output
    assert "DDP: 2 ranks on cpu" in output
    for a, b in zip(metrics_of(tmp_path / "alone"), metrics_of(tmp_path / "right"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-10)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-10)
    folder = tmp_path / "right" / "logs" / "attempt-0"
    assert [report.exit_code for report in RankReport.read_all(folder)] == [0, 0]
    assert (folder / "rank-0.log").read_text() in output
    assert (folder / "rank-1.log").exists()


def processes_under(pid: int) -> list[int]:
    """A process and what it has started, and those again."""
    found = [pid]
    for parent in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """Addresses and ports that these processes listen on."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                sockets.add(str(link.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                address, port = words[1].split(":")
                octets = struct.pack(
                    f"={len(address) // 8}I", *(int(address[i : i + 8], 16) for i in range(0, len(address), 8))
                )
                found.append((str(ipaddress.ip_address(octets)), int(port, 16)))
    return found


ATTACKS = [
    b"[" * 60_000 + b"\n",
    b'{"token": 1, "rank": 1, "host": "x"}\n',
    b'{"rank": 1, "mark": {"step": Infinity}}\n',
    b"x" * 3_000_000,
]


def test_one_machine_listens_on_loopback_and_strangers_end_nothing_but_a_signal_saves_once(tiny, tmp_path, capfd):
    """SIGTERM to `flatout train`: every rank exits 75, one checkpoint; `gpus: [1]` goes on in one process."""
    batch = {"samples_per_step": 7, "micro_batch_tokens": 600, "max_steps": 100_000}
    run_dir = tmp_path / "run"
    process = launch(tiny.config(run_dir, **settings(tiny, batch=batch)), tmp_path)
    wait_for_steps(run_dir, 3)
    ports = listening(processes_under(process.pid))
    assert len(ports) >= 2
    assert {address for address, _ in ports} <= {"127.0.0.1", "::1"}
    attack(ports, run_dir)
    process.terminate()
    output = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 75, output
    assert [path.name for path in sorted((run_dir / "logs").iterdir())] == [".lock", "attempt-0", "latest"]
    assert [report.exit_code for report in RankReport.read_all(run_dir / "logs" / "attempt-0")] == [75, 75]
    saved = [path.name for path in (run_dir / "checkpoints").glob("step-*")]
    assert len(saved) == 1
    stopped_at = int(saved[0].removeprefix("step-"))
    shorter = settings(tiny, gpus=[1], batch={**batch, "max_steps": stopped_at + 1})
    alone = tiny.config(run_dir, **shorter, checkpoint={"allow_change": ["batch.max_steps"]})
    (tmp_path / "alone.yaml").write_text(dump_config(alone))
    capfd.readouterr()
    assert main(["train", str(tmp_path / "alone.yaml")]) == 0
    output = capfd.readouterr().out
    assert f"from step {stopped_at}" in output
    assert "Single: 1 rank" in output


def attack(ports: list[tuple[str, int]], run_dir: Path) -> None:
    """Send what no rank sends to each port, while the run takes steps, and open more connections than it may have."""
    with ExitStack() as stack:
        for address, port in ports:
            for content in ATTACKS:
                stranger = stack.enter_context(socket.create_connection((address, port), timeout=1))
                with suppress(OSError):
                    stranger.sendall(content)
            with suppress(OSError):
                for _ in range(100):
                    stack.enter_context(socket.create_connection((address, port), timeout=1))
        wait_for_steps(run_dir, num_steps_told(run_dir) + 5)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    (dropped,) = (event for event in events if event["kind"] == "rejected_connection")
    assert dropped["address"] == "127.0.0.1"
    # on a slow machine, the first to be told is one of the many
    assert dropped["why"] in ("it did not send the secret of this run", "too many connections without the secret")


def rank_processes(supervisor: int) -> list[int]:
    """The ranks' processes, as soon as both are there."""
    until_s = time.monotonic() + DEADLINE_S
    while len(pids := processes_under(supervisor)) < 3:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    return pids[1:3]


@pytest.mark.exhaustive
def test_a_killed_supervisor_leaves_nothing_behind_while_ranks_start(tiny, tmp_path):
    """From the first moment of a rank on; the same command is not refused afterwards."""
    config = tiny.config(tmp_path / "run", **settings(tiny))
    for wait_s in (0.0, 1.0):
        process = launch(config, tmp_path)
        pids = rank_processes(process.pid)
        time.sleep(wait_s)  # anywhere in the start: what is proved must hold at any time
        process.kill()
        process.communicate(timeout=DEADLINE_S)
        until_s = time.monotonic() + DEADLINE_S
        while any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids):
            assert time.monotonic() < until_s
            time.sleep(0.01)
    process = launch(config, tmp_path)
    output = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 0, output


@pytest.mark.parametrize(
    ("gpus", "tokenizes"), [pytest.param([0, 1], False, marks=pytest.mark.exhaustive), ([0], True)]
)
def test_ctrl_c_at_the_start_is_one_line(tiny, tmp_path, gpus, tokenizes):
    """As a terminal sends it, to the whole foreground group, processes that tokenize included."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(tiny.chats.read_text() * (300 if tokenizes else 1))
    data = {"name": "fresh", "root": str(tmp_path / "data"), "num_procs": 2, "sources": [{"path": str(rows)}]}
    process = launch(tiny.config(tmp_path / "run", **settings(tiny, gpus=gpus, data=data)), tmp_path, process_group=0)
    until_s = time.monotonic() + DEADLINE_S
    while not has_started(process.pid, tmp_path / "run", tokenizes):
        assert time.monotonic() < until_s
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 130, output
    assert "Traceback" not in output, output
    assert [line for line in output.splitlines() if "stop" in line] == ["stopped"]


def has_started(pid: int, run_dir: Path, tokenizes: bool) -> bool:
    """Whether a run stands after its first line, or is in the middle of tokenizing."""
    if not tokenizes:
        return (run_dir / "train.log").exists()
    time.sleep(0.05)
    commands = []
    for child in processes_under(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            commands.append(Path(f"/proc/{child}/cmdline").read_bytes())
    return sum(b"flatout.data.workers" in command for command in commands) >= 2


def test_a_second_signal_ends_ranks_at_once(tiny, tmp_path):
    """Also one that hears nothing, as it is stopped."""
    batch = {"samples_per_step": 7, "micro_batch_tokens": 600, "max_steps": 100_000}
    process = launch(tiny.config(tmp_path / "run", **settings(tiny, batch=batch)), tmp_path)
    wait_for_steps(tmp_path / "run", 3)
    os.kill(rank_processes(process.pid)[1], signal.SIGSTOP)
    process.terminate()
    ended_s = time.monotonic() + DEADLINE_S / 2
    # after a moment a second signal is another one; before, it is the same one passed on twice
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        assert time.monotonic() < ended_s
        process.terminate()
    output = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    assert output.endswith("killed; steps since the last checkpoint are lost\n")
