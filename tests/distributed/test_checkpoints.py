"""Save under one strategy and number of ranks, load under every other; one rank's failure costs no older state."""

from pathlib import Path
from typing import Any

import pytest
from launching import DEADLINE_S
from spawned_ranks import start_warm_ranks
from warm_process import WarmProcess

from flatout.checkpoint.manifest import read_manifest
from flatout.checkpoint.write import Checkpoints

HERE = Path(__file__).parent


def start(folder: Path, num_ranks: int) -> list[WarmProcess]:
    words = [str(HERE / "checkpoint_ranks.py"), str(folder)]
    return start_warm_ranks(num_ranks, lambda _: words, folder / f"logs-{num_ranks}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three sessions, of 1, 2 and 4 ranks, that check each other's states; rank 1 of 2 is killed at the end."""
    folder = tmp_path_factory.mktemp("worlds")
    for name in ("one", "ddp2", "fsdp2", "fsdp4", "hsdp2x2", "walk-2", "walk-4", "full-hsdp2x2", "damaged", "killed"):
        (folder / name).mkdir()
    processes = [process for num_ranks in (1, 2, 4) for process in start(folder, num_ranks)]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0, 0, -9, 0, 0, 0, 0], "\n".join(outputs)
    return folder


def test_every_state_loads_under_every_strategy(saved):
    """Proved inside the sessions; here only that the files are those of the strategies that wrote them."""
    files = {
        name: sorted(file.removesuffix(".safetensors") for file in manifest.files if file != "state.json")
        for name in ("one", "ddp2", "fsdp2", "hsdp2x2")
        if (manifest := read_manifest(saved / name / "checkpoints" / "step-3"))
    }
    assert files["one"] == ["model", "optimizer"]
    assert files["ddp2"] == ["model", "optimizer"]
    parts = ["model-rank-0", "model-rank-1", "optimizer-rank-0", "optimizer-rank-1"]
    assert files["fsdp2"] == parts
    # of two replicas one writes
    assert files["hsdp2x2"] == parts


def test_a_rank_killed_in_a_save_costs_only_that_save(saved):
    events: list[tuple[str, Any]] = []
    found = Checkpoints(saved / "killed", keep=2, on_event=lambda kind, facts: events.append((kind, facts))).newest()
    assert (saved / "killed" / "noticed").exists()
    assert found is not None
    assert found.step == 1
    assert [(kind, ".tmp-" in facts["path"]) for kind, facts in events] == [("unfinished", True)]
