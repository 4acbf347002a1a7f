"""Save under one strategy and number of ranks, load under every other; one rank's failure costs no older state."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.train.checkpoint import Checkpoints
from flatout.train.manifest import read_manifest

HERE = Path(__file__).parent


def start(folder: Path, num_ranks: int) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    paths = [str(HERE.parents[1]), str(HERE.parent / "unit" / "train"), os.environ.get("PYTHONPATH", "")]
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / "checkpoint_ranks.py"), str(folder)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sessions, of 1, 2 and 4 ranks, that check each other's states; rank 1 of 2 is killed at the end."""
    folder = tmp_path_factory.mktemp("worlds")
    for name in ("one", "ddp2", "fsdp2", "fsdp4", "hsdp2x2", "walk-2", "walk-4", "full-hsdp2x2", "damaged", "killed"):
        (folder / name).mkdir()
    processes = [process for num_ranks in (1, 2, 4) for process in start(folder, num_ranks)]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0, 0, -9, 0, 0, 0, 0], "\n".join(outputs)
    return folder


def test_every_state_loads_under_every_strategy(saved: Path) -> None:
    """Proved inside the sessions; here only that the files are those of the strategies that wrote them."""
    files = {
        name: sorted(file.removesuffix(".safetensors") for file in manifest.files if file != "state.json")
        for name in ("one", "ddp2", "fsdp2", "hsdp2x2")
        if (manifest := read_manifest(saved / name / "checkpoints" / "step-3"))
    }
    assert files["one"] == ["model", "optimizer", "rng-0"]
    assert files["ddp2"] == ["model", "optimizer", "rng-0", "rng-1"]
    parts = ["model-rank-0", "model-rank-1", "optimizer-rank-0", "optimizer-rank-1"]
    assert files["fsdp2"] == [*parts, "rng-0", "rng-1"]
    # of two replicas one writes
    assert files["hsdp2x2"] == [*parts, "rng-0", "rng-1", "rng-2", "rng-3"]


def test_a_rank_killed_in_a_save_costs_only_that_save(saved: Path) -> None:
    events: list[tuple[str, Any]] = []
    found = Checkpoints(saved / "killed", keep=2, on_event=lambda kind, facts: events.append((kind, facts))).newest()
    assert (saved / "killed" / "noticed").exists()
    assert found is not None
    assert found.step == 1
    assert [(kind, ".tmp-" in facts["path"]) for kind, facts in events] == [("unfinished", True)]
