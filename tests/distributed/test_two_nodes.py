"""Two nodes on one machine: network namespaces with addresses of their own, and a link that is cut in mid-run."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launching import DEADLINE_S, num_steps_told, settings, wait_for_steps

from flatout.config.read import dump_config

HANG_S = 4.0
NUM_STEPS = 150
HOST = "10.213.77.1"
TAG = f"fl{os.getpid() % 100_000}"
NODES = (f"{TAG}a", f"{TAG}b")
needs_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and the command ip"
)


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def nodes():
    made = [ip("netns", "add", name) for name in NODES]
    try:
        made.append(ip("link", "add", NODES[0], "type", "veth", "peer", "name", NODES[1]))
        for number, name in enumerate(NODES):
            made.append(ip("link", "set", name, "netns", name))
            made.append(ip("-n", name, "addr", "add", f"10.213.77.{number + 1}/24", "dev", name))
            made += [ip("-n", name, "link", "set", device, "up") for device in ("lo", name)]
        failed = [done.stderr.strip() for done in made if done.returncode]
        if failed:
            pytest.skip(f"network namespaces are not permitted here: {failed[0]}")
        yield NODES
    finally:
        for name in NODES:
            ip("netns", "del", name)


def start(config: Path, number: int, nnodes: str = "2", secret: str = "0123456789abcdef") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flatout", "train", str(config), f"--nnodes={nnodes}", f"--node-rank={number}"]
    return subprocess.Popen(
        ["ip", "netns", "exec", NODES[number], *command, f"--rdzv={HOST}:29400"],
        env={**os.environ, "FLATOUT_SECRET": secret},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def link(node: str, state: str) -> None:
    assert ip("-n", node, "link", "set", node, state).returncode == 0


def wait_for_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"no {text!r} in {path}"
        time.sleep(0.1)


def write_config(tiny: Any, folder: Path, num_steps: int = NUM_STEPS) -> Path:
    batch = {"samples_per_step": 7, "micro_batch_tokens": 600, "max_steps": num_steps}
    made = settings(tiny, gpus=None, batch=batch)
    faults = {"hang_s": HANG_S, "max_restarts": 3}
    config = folder / "run.yaml"
    config.write_text(dump_config(tiny.config(folder / "run", **made, faults=faults, checkpoint={"every_steps": 10})))
    return config


@pytest.mark.slow
@needs_root
def test_one_node_goes_on_alone_and_takes_the_other_back(nodes, tiny, tmp_path, metrics_of):
    config, run_dir = write_config(tiny, tmp_path, num_steps=100_000), tmp_path / "run"
    running = [start(config, number, "1:2") for number in range(2)]
    logs = run_dir / "logs" / "node-0"
    try:
        wait_for_steps(run_dir, 12)
        link(nodes[0], "down")
        wait_for_text(logs / "attempt-1" / "rank-0.log", "Single: 1 rank")
        num_alone = num_steps_told(run_dir)
        wait_for_steps(run_dir, num_alone + 5)
        link(nodes[0], "up")
        wait_for_text(logs / "attempt-2" / "rank-0.log", "DDP: 2 ranks")
        num_together = num_steps_told(run_dir)
        wait_for_steps(run_dir, num_together + 5)
        for process in running:
            process.terminate()
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [75, 75], outputs
    # together, alone, and together again, after a save that the other node's return asked for
    taken = re.findall(r"strategy +(?:DDP|Single): (\d) rank", outputs[0])
    assert taken == ["2", "1", "2"], outputs[0]
    assert outputs[0].count("stop requested: saved at step") >= 2
    steps = [record["step"] for record in metrics_of(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
